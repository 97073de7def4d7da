"""The translation of one file's graph, and the names of its inputs and outputs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx.inliner
import onnx_ir as ir
import torch

from torch2ort.differentiate.lower_step import lower_half
from torch2ort.errors import ExportError
from torch2ort.graph.file_form import forget_unused_domains
from torch2ort.graph.graph_traversal import FORWARD_ATTRIBUTE
from torch2ort.graph.lowered_graph import Lowered
from torch2ort.program.effect_order import order_after
from torch2ort.program.target import Target
from torch2ort.pythonop import Site
from torch2ort.runtime.workarounds import apply_exact_workarounds
from torch2ort.symbolics.value_names import name_interface
from torch2ort.training_files.step_graph import StepGraph

# The largest message of protobuf.
_MOST_BYTES = (1 << 31) - 1


@dataclass(frozen=True)
class Part:
    """A translated graph whose inputs and outputs have no names yet.

    Attributes:
        proto: the graph.
        inputs: the name of each input, in order.
        outputs: the name of each output, in order.
        constants: values of inputs that become constants.
        calls: True if it calls Functions.
    """

    proto: onnx.ModelProto
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, torch.Tensor]
    calls: bool

    def model(self) -> ir.Model:
        """Return a copy of the graph that may be changed: renaming a value would also change its proto."""
        return ir.from_proto(copy.deepcopy(self.proto))

    def file(self) -> onnx.ModelProto:
        """Return the graph with its names and its constants.

        Raises:
            ExportError: the graph is larger than protobuf allows.
        """
        return named(self.model(), self.inputs, self.outputs, self.constants, self.calls)


def lower_step(made: StepGraph, target: Target, functions: dict[str, Site]) -> Part:
    """Translate a graph.

    Args:
        made: the graph.
        target: the runtime of the file.
        functions: receives the site of each Function that the graph calls, by its key.

    Raises:
        UnsupportedOperatorError: an operator has no translation to ONNX's operators.
    """
    lowered = lower_half(made.finish(), target)
    functions.update({site.key: site for site in lowered.calls.values()})
    model = ir.from_proto(lowered.proto)
    _tie_derivatives(model.graph, lowered)
    return Part(
        apply_exact_workarounds(ir.to_proto(model)),
        tuple(made.inputs),
        tuple(made.outputs),
        made.constants,
        bool(lowered.calls),
    )


def named(
    model: ir.Model,
    inputs: Sequence[str],
    outputs: Sequence[str],
    constants: Mapping[str, torch.Tensor],
    calls: bool,
) -> onnx.ModelProto:
    """Return a graph with the names of its inputs and outputs, and with its constants.

    Args:
        model: the graph; it is changed.
        inputs: the name of each input, in order.
        outputs: the name of each output, in order.
        constants: values of inputs that become constants.
        calls: True if it calls Functions.

    Raises:
        ExportError: it is larger than protobuf allows.
    """
    name_interface(model.graph, inputs, outputs, "")
    for value in list(model.graph.inputs):
        if value.name is not None and value.name in constants:
            model.graph.inputs.remove(value)
            value.const_value = _tensor(constants[value.name], value.name)
            model.graph.register_initializer(value)
    if sum(t.const_value.nbytes for t in model.graph.initializers.values() if t.const_value) > _MOST_BYTES:
        raise ExportError(
            "the constants of the training step are larger than 2 GiB, which one ONNX file holds"
        )
    proto = onnx.inliner.inline_local_functions(ir.to_proto(model))
    forget_unused_domains(proto)
    if not calls:
        onnx.checker.check_model(proto)
    return proto


def _tie_derivatives(graph: ir.Graph, lowered: Lowered) -> None:
    """Let each derivative of a Function name its forward call, and run after that call."""
    calls = {site.key: name for name, site in lowered.calls.items()}
    pairs = {name: calls[site.key] for name, site in lowered.derivatives.items()}
    for node in graph:
        if node.name in pairs:
            node.attributes.add(ir.AttrString(FORWARD_ATTRIBUTE, pairs[node.name]))
    order_after(graph, pairs)


def _tensor(value: torch.Tensor, name: str) -> ir.TensorProtocol:
    return ir.tensor(value.detach().cpu().contiguous(), name=name)
