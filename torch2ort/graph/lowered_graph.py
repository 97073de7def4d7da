"""One half of a step as ONNX, from which a session is made."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from torch2ort.pythonop import Site


@dataclass(frozen=True)
class Lowered:
    """A half of a step as ONNX.

    Attributes:
        proto: its inputs and outputs are the half's, in order.
        calls: the site of each PythonOp node, by node name.
        derivatives: the site of each PythonOpGrad node, by node name.
    """

    proto: onnx.ModelProto
    calls: dict[str, Site]
    derivatives: dict[str, Site]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return tuple(value.name for value in self.proto.graph.input)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs."""
        return tuple(value.name for value in self.proto.graph.output)
