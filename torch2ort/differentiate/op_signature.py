"""One operator of a half: texts that identify it, and a half that computes it alone."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator
from typing import Any, cast

import torch

from torch2ort._torch.aot import OpOverload, graph_module
from torch2ort.differentiate.split import Half
from torch2ort.differentiate.symbolic_shapes import elements as elements_of
from torch2ort.program.dim_order import unpermuted

aten = torch.ops.aten
# Elements that an operator reads and returns, below which a call costs more than another library gains.
LARGE = 4096


def is_fixed(node: torch.fx.Node) -> bool:
    """Return True if all tensors that a node reads and computes have fixed sizes, and floats are float32.

    In other dtypes PyTorch's kernels round where eager PyTorch does, so the rule always uses them.
    """
    if not isinstance(node.target, OpOverload):
        return False
    values = [value for n in (node, *node.all_input_nodes) for value in _values(n)]
    return bool(values) and all(_is_plain(value) for value in values)


def signature(node: torch.fx.Node) -> str:
    """Return a text of the operator and its arguments, with tensors as dtypes and sizes."""
    return json.dumps([str(node.target), *_arguments(node, _sizes)])


def description(node: torch.fx.Node) -> str:
    """Return a text of all that an operator's time depends on: arguments, layouts and the results in use."""
    read = sorted(_numbers(node))
    return json.dumps([str(node.target), *_arguments(node, _layout), read])


def elements(node: torch.fx.Node) -> int:
    """Return how many elements an operator reads and computes; for sizes that vary, those of the sample."""
    values = [value for n in (node, *node.all_input_nodes) for value in _values(n)]
    return sum(elements_of(value) for value in values if value is not None)


def words(node: torch.fx.Node) -> str:
    """Return an operator and the sizes of its operands, for messages."""
    sizes = [str(list(n.meta["val"].shape)) for n in node.all_input_nodes]
    return f"{node.target} of {', '.join(sizes)}"


def alone(node: torch.fx.Node) -> tuple[Half, torch.fx.Node]:
    """Build a half that computes one operator.

    An operand that is a tensor with permuted dimensions remains one, as ONNX Runtime fuses many
    transpositions into the operator that reads them.

    Args:
        node: a call of an operator, see :func:`is_fixed`.

    Returns:
        The half, and the operator in it.
    """
    graph = torch.fx.Graph()
    read = {operand: unpermuted(operand) for operand in node.all_input_nodes}
    sources = [operand if order is None else source for operand, (source, order) in read.items()]
    inputs: dict[torch.fx.Node, torch.fx.Node] = {}
    for source in dict.fromkeys(sources):
        inputs[source] = graph.placeholder(f"given_{len(inputs)}")
        inputs[source].meta = {"val": source.meta["val"]}

    def operand(given: torch.fx.Node) -> torch.fx.Node:
        source, order = read[given]
        if order is None:
            return inputs[given]
        turned = graph.call_function(aten.permute.default, (inputs[source], order))
        turned.meta = {"val": given.meta["val"]}
        return turned

    arguments = torch.fx.node.map_arg(node.args, operand)
    keywords = torch.fx.node.map_arg(node.kwargs, operand)
    made = graph.call_function(cast(OpOverload, node.target), arguments, keywords)
    made.meta = {"val": node.meta["val"]}
    results = [made]
    if isinstance(node.meta["val"], (list, tuple)):
        results = [_part(made, number) for number in sorted(_numbers(node))]
    graph.output(tuple(results))
    return Half(graph_module(graph), tuple(inputs), tuple(results)), made


def _part(node: torch.fx.Node, number: int) -> torch.fx.Node:
    part = node.graph.call_function(operator.getitem, (node, number))
    part.meta = {"val": node.meta["val"][number]}
    return part


def _numbers(node: torch.fx.Node) -> set[int]:
    """Return the indices of the results that are used, of an operator with several."""
    if not isinstance(node.meta["val"], (list, tuple)):
        return set()
    return {cast(int, user.args[1]) for user in node.users if user.target is operator.getitem}


def _values(node: torch.fx.Node) -> Iterator[Any]:
    value = node.meta.get("val")
    yield from value if isinstance(value, (list, tuple)) else (value,)


def _is_plain(value: Any) -> bool:
    if value is None:  # a result that was not asked for
        return True
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return False
    is_known = not value.dtype.is_floating_point or value.dtype is torch.float32
    return is_known and all(type(size) is int and size > 0 for size in value.shape)


def _arguments(node: torch.fx.Node, of_tensor: Any) -> list[Any]:
    def text(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return {"tensor": of_tensor(value)}
        if isinstance(value, (list, tuple)):
            return [text(item) for item in value]
        return value if value is None or type(value) in (bool, int, str) else repr(value)

    return [text(node.args), {name: text(value) for name, value in sorted(node.kwargs.items())}]


def _sizes(node: torch.fx.Node) -> list[Any]:
    value = node.meta["val"]
    # A size that varies is that of no measured operator.
    return [str(value.dtype), *(size if type(size) is int else str(size) for size in value.shape)]


def _layout(node: torch.fx.Node) -> list[Any]:
    source, order = unpermuted(node)
    strides = list(source.meta["val"].stride())
    return [*_sizes(node), {"order": order, "strides": strides}]
