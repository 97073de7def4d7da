"""The graph of one file: forward, backward, and the use of the gradients."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch2ort.differentiate.split import Half, copied_node
from torch2ort.differentiate.symbolic_shapes import SizeNodes
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.graph.node_provenance import kernel_name
from torch2ort.program.fx_inline import inline
from torch2ort.program.kernel_sites import is_random
from torch2ort.pythonop import site_by_key
from torch2ort.pythonop.python_op_autograd import DIFFERENTIABLE_PYTHON_OP, PYTHON_OP_GRAD
from torch2ort.support.provenance import source_line
from torch2ort.training_files.arguments import input_taken
from torch2ort.training_files.counter_rng import draw_from_seed
from torch2ort.training_files.traced_step import TracedStep

aten = torch.ops.aten
_PYTHON_OP = torch.ops.torch2ort.python_op.default
LEARNING_RATE, SEED, RESET = "learning_rate", "seed", "lazy_reset_grad"


@dataclass
class StepGraph:
    """A graph under construction.

    Attributes:
        mode: the mode of its fake tensors.
        graph: its nodes.
        inputs: name -> placeholder, in order.
        outputs: name -> node, in order.
        constants: name of an input -> its value.
    """

    mode: Any
    graph: torch.fx.Graph = field(default_factory=torch.fx.Graph)
    inputs: dict[str, torch.fx.Node] = field(default_factory=dict)
    outputs: dict[str, torch.fx.Node] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)

    def input(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.fx.Node:
        """Add an input of a fixed shape.

        Raises:
            ExportError: an argument of the model has its name.
        """
        self._refuse(name)
        made = self.graph.placeholder(f"input_{len(self.inputs)}")
        with self.mode:
            made.meta = {"val": torch.empty(list(shape), dtype=dtype)}
        self.inputs[name] = made
        return made

    def input_like(self, name: str, node: torch.fx.Node) -> torch.fx.Node:
        """Add an input of the shape and dtype of a node of another graph of the same mode.

        Raises:
            ExportError: an argument of the model has its name.
        """
        self._refuse(name)
        made = self.inputs[name] = self.graph.placeholder(f"input_{len(self.inputs)}")
        made.meta = {"val": node.meta["val"].detach()}
        return made

    def _refuse(self, name: str) -> None:
        if name in self.inputs:
            raise input_taken(name)

    def compute(
        self, function: Callable[..., Sequence[torch.Tensor]], arguments: Sequence[torch.fx.Node]
    ) -> list[torch.fx.Node]:
        """Add the operators of plain PyTorch code, and return the nodes of its results."""
        return inline(self.graph, function, arguments)

    def finish(self) -> Half:
        """Finish the graph, and return it for the translation."""
        seed = self.inputs.get(SEED)
        if seed is not None:
            draw_from_seed(self.graph, seed)
        outputs = tuple(self.outputs.values())
        self.graph.output(outputs)
        module = torch.fx.GraphModule(torch.nn.Module(), self.graph)
        return Half(module, tuple(self.inputs.values()), outputs)


def mode_of(step: TracedStep) -> Any:
    """Return the mode of a traced step's fake tensors."""
    return next(iter(step.joint.inputs)).meta["val"].fake_mode


def draws(step: TracedStep) -> bool:
    """Return True if a step draws random numbers."""
    return any(is_random(node) for node in step.joint.graph_module.graph.nodes)


def place_inputs(made: StepGraph, step: TracedStep) -> dict[torch.fx.Node, torch.fx.Node]:
    """Add the inputs of a step to a graph: its batch, parameters, buffers, and constants.

    Returns:
        Node of the joint graph -> placeholder.
    """
    order = ("batch", "parameter", "buffer", "constant")
    values = {}
    for kind in order:
        for node, position in step.joint.inputs.items():
            given = step.given[position]
            if given.kind == kind:
                values[node] = made.input_like(given.name, node)
                if given.kind == "constant":
                    assert given.value is not None
                    made.constants[given.name] = given.value
    return values


def add_step(
    made: StepGraph, step: TracedStep, values: dict[torch.fx.Node, torch.fx.Node]
) -> dict[str, torch.fx.Node]:
    """Add forward and backward to a graph.

    Args:
        made: the graph, with its inputs.
        step: the step.
        values: the result of :func:`place_inputs`; the nodes of forward and backward are added to it.

    Returns:
        Name of a parameter that has a gradient -> the gradient.
    """
    joint, sizes = step.joint, SizeNodes(made.graph)
    for node in joint.graph_module.graph.nodes:
        if node in joint.tangents:
            values[node] = _ones(made.graph, node, loss=joint.tangents[node] == 0)
        elif node.op == "call_function" and not _is_token(node):
            values[node] = _copied(made.graph, node, sizes, values)
    return {
        step.given[position].name: values[node]
        for position, node in joint.gradients.items()
        if step.given[position].kind == "parameter" and position in step.reached
    }


def _ones(graph: torch.fx.Graph, node: torch.fx.Node, *, loss: bool) -> torch.fx.Node:
    value = node.meta["val"]
    shape = [int(size) for size in value.shape]
    number = 1 if loss else 0
    made = graph.call_function(
        aten.full.default, (shape, number), {"dtype": value.dtype, "device": value.device}
    )
    made.meta = {"val": value.detach()}
    return made


def _is_token(node: torch.fx.Node) -> bool:
    """Return True if a node is a token, which ties a Function's backward to its forward."""
    if node.target is not operator.getitem:
        return False
    call, position = node.args
    assert isinstance(call, torch.fx.Node)
    return bool(call.target is DIFFERENTIABLE_PYTHON_OP and position == len(call.meta["val"]) - 1)


def _copied(
    graph: torch.fx.Graph,
    node: torch.fx.Node,
    sizes: SizeNodes,
    values: Mapping[torch.fx.Node, torch.fx.Node],
) -> torch.fx.Node:
    if node.target is PYTHON_OP_GRAD:
        _, gradients, site, shapes = node.args
        _refuse_kernel(node, str(site))
        given = [None if grad is None else values[grad] for grad in gradients]  # type: ignore[union-attr,index]
        shapes = sizes.map_arguments(shapes, values.__getitem__)
        made = graph.call_function(PYTHON_OP_GRAD, (None, given, site, shapes))
        made.meta = dict(node.meta)
        return made
    if node.target in (DIFFERENTIABLE_PYTHON_OP, _PYTHON_OP):
        _refuse_kernel(node, str(node.args[1]))
    made = copied_node(graph, node, sizes, values.__getitem__)
    if node.target is DIFFERENTIABLE_PYTHON_OP:
        made.target, made.meta["val"] = _PYTHON_OP, list(node.meta["val"])[:-1]
    return made


def _refuse_kernel(node: torch.fx.Node, key: str) -> None:
    site = site_by_key(key)
    if site.internal:
        raise UnsupportedOperatorError(
            f"{kernel_name(site)} at {source_line(node)} runs in PyTorch's kernel alone, and a file of a "
            f"training step runs without PyTorch. Write it with other operators"
        )
