"""Which engine runs a graph, and so what the graph is translated for."""

from __future__ import annotations

from torch2ort.options import DEFAULT_OPSET, Options
from torch2ort.runtime.probe import can_run
from torch2ort.symbolics.target import Target


def target_of(options: Options, *, differentiate: bool) -> Target:
    """What a graph must be to run on the installed onnxruntime.

    Args:
        options: the opset.
        differentiate: whether gradients are wanted.
    """
    return Target(opset=options.opset or DEFAULT_OPSET, differentiates=differentiate, can_run=can_run)
