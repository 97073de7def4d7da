"""Numbers that forward reads out of tensors, such as ``scale = x.abs().max().item()``, as tensors or sizes.

The joint trace passes tensors from forward to backward, and no numbers. A tensor of bool, int64 or float64
without dimensions computes as Python's number does: operators promote it to the dtype of their other operand.
Python arithmetic that raises errors of its own, or is of unbounded integers, runs as Python arithmetic. An
operator that has no overload with a tensor runs in PyTorch's kernel, which reads the number out of the
tensor. Where an operator expects a size or a position, the integer becomes the size of a tensor without
elements, which a half reads as it reads all sizes.
"""

from __future__ import annotations

import json
import math
import operator
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torch2ort._torch import aot as private
from torch2ort.differentiate.symbolic_shapes import same_sizes
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.kernels.scalar_expressions import name_of
from torch2ort.program.fx_insert import insert_call
from torch2ort.program.internal_ops import must_compute, number_as_sizes, python_number
from torch2ort.program.runtime_assertions import (
    CONDITIONS,
    READS,
    constant,
    read_number,
    reads_of,
    within_bounds,
)
from torch2ort.sizes.symbols import bounds, is_number
from torch2ort.support.provenance import source_line

aten = torch.ops.aten
# Operators over floats that compute as Python's do and never raise.
_OF_FLOATS: Mapping[Any, Any] = {
    operator.add: aten.add.Tensor,
    operator.sub: aten.sub.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.neg: aten.neg.default,
    torch.sym_max: aten.maximum.default,
    torch.sym_min: aten.minimum.default,
}
_SPLIT = aten.tensor_split.tensor_indices_or_sections
_TO_FLOAT = torch.sym_float
_MAY_RAISE = (operator.truediv, operator.floordiv, operator.mod, operator.pow)
_TYPES: Mapping[Any, torch.dtype] = {
    **dict.fromkeys((bool, torch.SymBool), torch.bool),
    **dict.fromkeys((int, torch.SymInt), torch.int64),
    **dict.fromkeys((float, torch.SymFloat), torch.float64),
}
# The overload with a tensor in the place of a number.
_WITH_TENSORS: Mapping[Any, Any] = {
    aten.add.Scalar: aten.add.Tensor,
    aten.clamp.default: aten.clamp.Tensor,
    aten.clamp_max.default: aten.clamp_max.Tensor,
    aten.clamp_min.default: aten.clamp_min.Tensor,
    aten.div.Scalar: aten.div.Tensor,
    aten.eq.Scalar: aten.eq.Tensor,
    aten.fill_.Scalar: aten.fill_.Tensor,
    aten.fmod.Scalar: aten.fmod.Tensor,
    aten.ge.Scalar: aten.ge.Tensor,
    aten.gt.Scalar: aten.gt.Tensor,
    aten.le.Scalar: aten.le.Tensor,
    aten.lt.Scalar: aten.lt.Tensor,
    aten.masked_fill.Scalar: aten.masked_fill.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.ne.Scalar: aten.ne.Tensor,
    aten.remainder.Scalar: aten.remainder.Tensor,
    aten.rsub.Scalar: aten.rsub.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.where.ScalarOther: aten.where.self,
    aten.where.ScalarSelf: aten.where.self,
}
# Operators that fill a tensor with a number -> those that fill it with ones, and the position of the number.
_FILLED: Mapping[Any, tuple[Any, int]] = {
    aten.full.default: (aten.ones.default, 1),
    aten.full_like.default: (aten.ones_like.default, 1),
    aten.new_full.default: (aten.new_ones.default, 2),
}
# Their arguments are numbers of any type, and determine how many elements there are.
_COUNTS = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_HALF = (torch.float16, torch.bfloat16)
_TAKES = "takes a number that is read out of a tensor"


def replace_read_numbers(graph: torch.fx.Graph, *, has_kernels: bool = True) -> None:
    """Replace the numbers that a program reads out of tensors by tensors.

    Floats that are computed from sizes are replaced, too: no half computes them from its sizes.

    Args:
        graph: of the program; changed in place. Nodes that still read a number afterwards run in PyTorch's
            kernel.
        has_kernels: whether PyTorch's kernels are available when the graph runs.

    Raises:
        UnsupportedOperatorError: a number is used where no tensor can be; names the line.
    """
    for node in graph.find_nodes(op="call_function", target=_SPLIT):
        _slice(node)
    numbers: dict[torch.fx.Node, torch.fx.Node | None] = {}
    sized: set[torch.fx.Node] = set()
    for node in list(graph.nodes):
        taken = _NumberNode(graph, node, numbers, has_kernels=has_kernels)
        if node.target in CONDITIONS:
            continue
        if node.target in READS:
            numbers[node] = taken.read()
        elif isinstance(node.meta.get("val"), torch.SymFloat):
            numbers[node] = taken.compute()
        elif not numbers.keys().isdisjoint(node.all_input_nodes):
            if is_number(node.meta.get("val")):
                numbers[node] = taken.compute()
            elif not taken.replace():
                sized.update(n for n in node.all_input_nodes if n in numbers)
    _drop_unread(graph, numbers, sized)


def _slice(node: torch.fx.Node) -> None:
    """Replace a split at positions that are in a tensor by slices at these numbers."""
    tensor, places, dim = (*node.args, 0)[:3]
    (count,) = places.meta["val"].shape  # type: ignore[union-attr]
    selected = [insert_call(node, aten.select.int, places, 0, i) for i in range(count)]
    ends = [insert_call(node, aten.item.default, place) for place in selected]
    parts = [
        insert_call(node, aten.slice.Tensor, tensor, dim, start, end)
        for start, end in zip((0, *ends), (*ends, sys.maxsize), strict=True)
    ]
    for part in list(node.users):
        part.replace_all_uses_with(parts[part.args[1]])  # type: ignore[index]
        node.graph.erase_node(part)
    node.graph.erase_node(node)


def _drop_unread(
    graph: torch.fx.Graph, numbers: Mapping[torch.fx.Node, torch.fx.Node | None], sized: set[torch.fx.Node]
) -> None:
    """Remove the numbers that are not used as sizes, and the conditions on them.

    Args:
        graph: of the program.
        numbers: all numbers that are read or computed, in order, and the tensors that represent them.
        sized: the numbers that are used as sizes.
    """
    for node in reversed(list(numbers)):
        if node in sized and not _is_read(node):
            sized.update(n for n in node.all_input_nodes if n in numbers)
    for node in reversed(graph.nodes):
        if node.target in CONDITIONS and not sized.issuperset(reads_of(node)):
            graph.erase_node(node)
    for node in reversed(list(numbers)):
        if not node.users:
            graph.erase_node(node)
        elif _is_read(node):
            number = numbers[node]
            if number is None:
                raise _refusal(node, "computes a size of a number that is read out of a tensor")
            node.replace_all_uses_with(_size_of(number, node))
            graph.erase_node(node)


def _is_read(node: torch.fx.Node) -> bool:
    """Return True if a number is read out of a tensor in a run, or is computed by Python and may raise."""
    return node.target in READS or node.target in _MAY_RAISE


def _size_of(number: torch.fx.Node, read: torch.fx.Node) -> torch.fx.Node:
    """Insert the size that is equal to the number in a tensor, and return it.

    Args:
        number: the tensor.
        read: the node that reads the number; the size is inserted before it.
    """
    low, high = bounds(read.meta["val"])
    sizes = insert_call(read, number_as_sizes, within_bounds(number, read, low, high), low, high)
    parts = [insert_call(read, aten.sym_size.int, sizes, axis) for axis in range(sizes.meta["val"].dim() - 1)]
    size = parts[0] if len(parts) == 1 else insert_call(read, operator.sub, *parts)
    size.meta["val"] = read.meta["val"]
    return size


class _NumberNode:
    """A node that computes or uses numbers.

    Args:
        graph: of the program.
        node: a node of it.
        numbers: the tensors that represent numbers so far; ``None`` for a number without one.
        has_kernels: whether PyTorch's kernels are available when the graph runs.
    """

    def __init__(
        self,
        graph: torch.fx.Graph,
        node: torch.fx.Node,
        numbers: Mapping[torch.fx.Node, torch.fx.Node | None],
        *,
        has_kernels: bool,
    ) -> None:
        self._graph, self._node, self._numbers = graph, node, numbers
        self._has_kernels = has_kernels

    def read(self) -> torch.fx.Node:
        """Return the tensor of a number that the node reads."""
        source = self._node.args[0]
        assert isinstance(source, torch.fx.Node)
        dtype = source.meta["val"].dtype
        if dtype.is_complex:
            raise _refusal(self._node, f"reads a number of {dtype} out of a tensor")
        return read_number(self._node, self._node)

    def compute(self) -> torch.fx.Node | None:
        """Return the tensor of a number that the node computes from others; ``None`` if there is none."""
        node = self._node
        if _is_floor_division(node):
            return None
        operands = [self._operand(argument) for argument in node.args]
        values = [operand.meta["val"] for operand in operands if isinstance(operand, torch.fx.Node)]
        if None not in operands and all(isinstance(value, torch.Tensor) for value in values):
            dtypes = {value.dtype for value in values}
            if node.target is _TO_FLOAT:
                return self._call(aten._to_copy.default, operands[0], dtype=torch.float64)
            if node.target in _OF_FLOATS and dtypes == {torch.float64}:
                return self._call(_OF_FLOATS[node.target], *operands)
        return self._by_python() if self._has_kernels else None

    def _by_python(self) -> torch.fx.Node | None:
        """Return the tensor of a number that Python computes in a run; ``None`` if it has no formula."""
        node, leaves = self._node, dict[torch.fx.Node, int]()
        formula = _formula(node, leaves)
        if formula is None:
            return None
        tensors = [self._leaf(leaf) for leaf in leaves]
        made = self._call(python_number, tensors, _TYPES[type(node.meta["val"])], json.dumps(formula))
        if node.target in _MAY_RAISE:
            self._call(must_compute, made)
        return made

    def _leaf(self, node: torch.fx.Node) -> torch.fx.Node:
        """Return the tensor of a number that is read, or of a size."""
        if node.target in READS:
            tensor = self._numbers[node]
            assert tensor is not None
            return tensor
        return self._call(aten.scalar_tensor.default, node, dtype=torch.int64)

    def replace(self) -> bool:
        """Replace the operator's numbers by tensors, except for those that are sizes.

        Returns:
            False if the operator uses one of the numbers as a size.
        """
        node, expected = self._node, self._node.meta.get("val")
        if not isinstance(node.target, private.OpOverload):
            raise _refusal(self._node, _TAKES)
        sizes = list(self._sizes())
        if any(not isinstance(size.meta["val"], torch.SymInt) for size in sizes):
            raise _refusal(self._node, _TAKES)
        others = [n for n in node.all_input_nodes if n in self._numbers and n not in sizes]
        if not others and sizes:
            return False
        if not isinstance(expected, torch.Tensor):
            raise _refusal(self._node, _TAKES)
        for cast in (None, expected.dtype):
            made = self._fill() if node.target in _FILLED else self._with_tensors(cast)
            if made is None:
                break
            found = made.meta["val"]
            if (
                isinstance(found, torch.Tensor)
                and found.dtype == expected.dtype
                and same_sizes(found, expected)
            ):
                made.meta = {**node.meta, "val": expected}
                node.replace_all_uses_with(made)
                self._graph.erase_node(node)
                return not sizes
            self._graph.erase_node(made)
            # In half precision, an operator uses Python's number unrounded, but a tensor's number rounded.
            if expected.dtype in _HALF:
                break
        self._leave_to_kernel(others)
        return not sizes

    def _leave_to_kernel(self, numbers: list[torch.fx.Node]) -> None:
        """Let the operator read the numbers out of tensors itself, as PyTorch's kernel can in a run."""
        node = self._node
        target: Any = private.functional(node.target)  # type: ignore[arg-type]
        if not self._has_kernels or target is None:
            raise _refusal(self._node, _TAKES)
        reads = {number: self._call(aten.item.default, self._tensor(number)) for number in numbers}
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: reads.get(n, n))
        made = self._call(target, *args, **kwargs)
        if target is not node.target:
            made = self._call(aten.copy_.default, node.args[0], made)
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        self._graph.erase_node(node)

    def _sizes(self) -> Iterator[torch.fx.Node]:
        """Yield the numbers that the operator uses as sizes or positions, not as values."""
        node = self._node
        arguments = node.target._schema.arguments  # type: ignore[union-attr]
        types = {argument.name: str(argument.type) for argument in arguments}
        given = dict(zip(types, node.args, strict=False)) | node.kwargs
        for name, value in given.items():
            if ("number" in types[name] and node.target not in _COUNTS) or "Tensor" in types[name]:
                continue
            yield from (leaf for leaf in _leaves([value]) if leaf in self._numbers)

    def _with_tensors(self, cast: torch.dtype | None) -> torch.fx.Node | None:
        """Return the operator with tensors in the place of numbers; ``None`` if it has no such overload."""
        node = self._node
        target = _WITH_TENSORS.get(node.target, node.target)
        arguments = target._schema.arguments
        given: list[Any] = []
        for position, argument in enumerate(node.args):
            takes_tensor = "Tensor" in str(arguments[position].type)
            if argument in self._numbers and not takes_tensor:
                return None
            number = argument in self._numbers or (
                target is not node.target and takes_tensor and isinstance(argument, (int, float))
            )
            given.append(self._tensor(argument, cast) if number else argument)
        if any(value in self._numbers for value in node.kwargs.values()):
            return None
        return self._attempt(target, *given, **node.kwargs)

    def _fill(self) -> torch.fx.Node | None:
        """Return a tensor of ones, multiplied by the number that the operator fills a tensor with."""
        node, dtype = self._node, self._node.meta["val"].dtype
        ones, position = _FILLED[node.target]
        number, others = node.args[position], list(node.args)
        del others[position]
        if number not in self._numbers:
            return None
        made = self._call(ones, *others, **{**node.kwargs, "dtype": dtype})
        return self._attempt(aten.mul.Tensor, made, self._tensor(number, dtype))

    def _tensor(self, argument: Any, cast: torch.dtype | None = None) -> Any:
        """Return the tensor that represents a number.

        Raises:
            UnsupportedOperatorError: no tensor does.
        """
        tensor = self._operand(argument)
        if tensor is None:
            what = f"takes a number that {argument.target} computed of one read out of a tensor"
            raise _refusal(self._node, what)
        return tensor if cast is None else self._call(aten._to_copy.default, tensor, dtype=cast)

    def _operand(self, argument: Any) -> Any:
        """Return a number's tensor, or ``None`` if it has none; other arguments are returned unchanged."""
        if argument in self._numbers:
            return self._numbers[argument]
        if isinstance(argument, (int, float)) and not isinstance(argument, bool):
            return constant(self._node, argument)
        return argument

    def _attempt(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node | None:
        """Return a call, or ``None`` if the operator does not accept the arguments."""
        try:
            return self._call(target, *args, **kwargs)
        except (RuntimeError, TypeError):
            return None

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        return insert_call(self._node, target, *args, **kwargs)


def _refusal(node: torch.fx.Node, what: str) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f"{node.target} at {source_line(node)} {what}, which a training graph does not take. "
        f"Keep it a tensor, as x.max() without .item(), or put this part of the model into a "
        f"torch.autograd.Function"
    )


def _formula(node: Any, leaves: dict[torch.fx.Node, int]) -> Any:
    """Return the formula for :func:`torch2ort.kernels.scalar_expressions.computed_number`, or ``None``.

    Args:
        node: the node that computes the number; or a number.
        leaves: the nodes that the number is computed from, and their positions; new ones are added.
    """
    if not isinstance(node, torch.fx.Node):
        return node
    if node.target in READS or node.target is aten.sym_size.int:
        return {"number": leaves.setdefault(node, len(leaves))}
    name = name_of(node.target)
    operands = [_formula(argument, leaves) for argument in node.args]
    return None if name is None or None in operands or _is_floor_division(node) else [name, *operands]


def _is_floor_division(node: torch.fx.Node) -> bool:
    """Return True if it may be ``a // b`` of floats: torch.export has ``floor(a / b)``, which can differ."""
    step: Any = node
    for target in (_TO_FLOAT, math.floor, operator.truediv):
        if not isinstance(step, torch.fx.Node) or step.target is not target:
            return False
        step = step.args[0]
    return True


def _leaves(items: list[Any]) -> list[Any]:
    """Return the items, with lists among them flattened."""
    return [leaf for item in items for leaf in (item if isinstance(item, (list, tuple)) else [item])]
