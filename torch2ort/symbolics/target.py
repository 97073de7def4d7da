"""What a graph is translated for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx

# (a node with all its attributes, ONNX element type of each input by name, and of each output) -> yes or no.
CanRun = Callable[[onnx.NodeProto, Mapping[str, int], Mapping[str, int]], bool]


@dataclass(frozen=True)
class Target:
    """What the engine that will run a graph can do, as far as its translation asks.

    Attributes:
        opset: version of ONNX's own operators.
        differentiates: whether the engine derives gradients from the graph, so that every operator needs a
            right one there.
        can_run: whether the engine has a kernel for a node.
    """

    opset: int
    differentiates: bool
    can_run: CanRun
