"""The files without gradients: loss and metrics in evaluation mode, and the model alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx
import onnx_ir as ir
import torch

from torch2ort.capture.sample_call import Call
from torch2ort.errors import ExportError
from torch2ort.exports.build import build
from torch2ort.options import Options
from torch2ort.pythonop import Site
from torch2ort.runtime.workarounds import apply_exact_workarounds
from torch2ort.training_files.lowered_step import named
from torch2ort.training_files.onnx_target import plain_target


def without_gradients(
    model: torch.nn.Module,
    call: Call,
    names: Mapping[int, str],
    state: Collection[str],
    results: list[str] | None,
    options: Options,
    functions: dict[str, Site],
) -> tuple[onnx.ModelProto, list[str], list[str]]:
    """Export a graph of one call in evaluation mode.

    Args:
        model: the model.
        call: the sample call.
        names: the name of each parameter and buffer in the ``state_dict``, by the tensor's id.
        state: names of the parameters and buffers that stay inputs; the others become constants.
        results: names of the outputs; ``None`` for the model's own names.
        options: options of the export.
        functions: receives the site of each Function that the graph calls, by its key.

    Returns:
        The graph, the names among ``state`` that it takes, and the names of its outputs.

    Raises:
        ExportError: the model cannot be exported.
        UnsupportedOperatorError: an operator has no translation to ONNX's operators.
    """
    target = plain_target(options.opset, is_step=False)
    program = build(model, call, training=False, target=target, options=options)
    graph = program.graph
    if graph.mutations or program.effects:
        raise ExportError(
            f"{type(model).__name__}: forward changes its buffers in evaluation mode, too, which a file for "
            f"evaluation does not"
        )
    functions.update({site.key: site for site in graph.sites.values()})
    origins = {name: names.get(id(program.weights[name]), origin) for name, origin in graph.weights.items()}
    taken = [name for name in origins.values() if name in state]
    constants = {
        f"constant.{origins[name]}": program.weights[name]
        for name in graph.weights
        if origins[name] not in state
    }
    wanted = [name if name in state else f"constant.{name}" for name in origins.values()]
    outputs = list(graph.outputs) if results is None else results
    made = ir.from_proto(apply_exact_workarounds(graph.proto))
    proto = named(made, [*graph.inputs, *wanted], outputs, constants, bool(graph.sites))
    return proto, taken, [value.name for value in proto.graph.output]
