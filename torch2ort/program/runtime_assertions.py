"""Checks of a model's conditions on values: ``torch._check(n.max().item() < 3)``, ``torch._assert_async``.

torch.export traces each as a node without a result, which a graph would lack. Here it becomes the check of
an index: a number that is 1 where the condition holds, the only number that is allowed.

Conditions on sizes alone are not included: kernels check the assumptions of torch.export on sizes themselves.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import optree
import torch

from torch2ort.errors import UnsupportedOperatorError
from torch2ort.kernels.functions import encode_call
from torch2ort.kernels.index_check import Check
from torch2ort.program import internal_ops
from torch2ort.program.fx_insert import insert_call
from torch2ort.sizes.symbols import is_number, raw_expression
from torch2ort.support.provenance import source_line

aten = torch.ops.aten
READS = (aten.item.default, aten._local_scalar_dense.default)
_ON_TENSORS = (aten._assert_async.default, aten._assert_async.msg)
_ON_NUMBERS = aten._assert_scalar.default
# Operators that state a condition on numbers, and compute nothing.
CONDITIONS = (
    _ON_NUMBERS,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
)
_RAISES = aten._assert_async.msg
# Operators on Python numbers -> the same on tensors without dimensions.
_COMPUTED: Mapping[Any, Any] = {
    operator.add: aten.add.Tensor,
    operator.and_: aten.logical_and.default,
    operator.eq: aten.eq.Tensor,
    operator.ge: aten.ge.Tensor,
    operator.gt: aten.gt.Tensor,
    operator.le: aten.le.Tensor,
    operator.lt: aten.lt.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.ne: aten.ne.Tensor,
    operator.neg: aten.neg.default,
    operator.or_: aten.logical_or.default,
    operator.sub: aten.sub.Tensor,
    torch.sym_ite: aten.where.self,
    torch.sym_max: aten.maximum.default,
    torch.sym_min: aten.minimum.default,
    torch.sym_not: aten.logical_not.default,
}
_DOES_NOT_HOLD = "a condition of the model does not hold for the number that is read at "
_NO_MESSAGE = "Expected Tensor with single nonzero value, but got zero"  # eager's own
# A condition with these may be torch.export's own guess of a size, where eager handles both outcomes.
_GUESSED = (operator.eq, operator.or_)


def keep_value_checks(graph: torch.fx.Graph) -> None:
    """Make each condition on values raise its error where it does not hold.

    Args:
        graph: a program's nodes; changed in place. The conditions' own nodes are kept.

    Raises:
        UnsupportedOperatorError: a condition uses a computation of numbers that has no equivalent for
            tensors.
    """
    for node in [node for node in graph.nodes if node.target in _ON_TENSORS]:
        _add(node, *node.args)
    for node, reads in _checked_conditions(graph).items():
        condition = node.args[0]
        lines = dict.fromkeys(map(source_line, reads))
        _add(
            node,
            _Numbers(node).tensor(condition),
            _DOES_NOT_HOLD + " and at ".join(lines),
        )


def drop_guesses(graph: torch.fx.Graph) -> None:
    """Remove the conditions that :func:`keep_value_checks` skips.

    Args:
        graph: the graph that was passed to it; changed in place.
    """
    checked = _checked_conditions(graph)
    for node in list(graph.nodes):
        if node.target is _ON_NUMBERS and node not in checked:
            graph.erase_node(node)


def _checked_conditions(graph: torch.fx.Graph) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """Return the conditions on numbers that are read out of tensors, with the nodes that read these."""
    asserted = graph.find_nodes(op="call_function", target=_ON_NUMBERS)
    sizes = _sizes(graph) if asserted else frozenset()
    reads = {node: list(dict.fromkeys(reads_of(node.args[0]))) for node in asserted}
    return {
        node: found for node, found in reads.items() if found and not _is_guess(node.args[0], found, sizes)
    }


def drop_conditions(graph: torch.fx.Graph) -> None:
    """Remove the conditions on numbers, and numbers that are unused without them.

    Args:
        graph: the graph that was passed to :func:`keep_value_checks`; changed in place.
    """
    for node in reversed(graph.nodes):
        is_unread = node.op == "call_function" and is_number(node.meta.get("val")) and not node.users
        if is_unread or node.target in CONDITIONS:
            graph.erase_node(node)


def within_bounds(
    number: torch.fx.Node, read: torch.fx.Node, low: int | None, high: int | None
) -> torch.fx.Node:
    """Return the number again, behind a check of the bounds that the trace assumes.

    Args:
        number: a tensor of int64 without dimensions.
        read: the node that reads it in the program; the check is inserted in front of it.
        low: its lower bound, inclusive; ``None`` if there is none.
        high: its upper bound, likewise.
    """
    sides = [(aten.ge.Scalar, low), (aten.le.Scalar, high)]
    holds = [insert_call(read, side, number, bound) for side, bound in sides if bound is not None]
    if not holds:
        return number
    both = holds[0] if len(holds) == 1 else insert_call(read, aten.logical_and.default, *holds)
    one = _checked(read, both, _DOES_NOT_HOLD + source_line(read))
    return insert_call(read, aten.mul.Tensor, number, one)


def read_number(place: torch.fx.Node, read: torch.fx.Node) -> torch.fx.Node:
    """Return a number that is read out of a tensor as a tensor, as exact as Python's: bool, int64 or float64.

    Args:
        place: the node to insert in front of.
        read: the node that reads the number.
    """
    (source,) = read.all_input_nodes
    dtype = source.meta["val"].dtype
    exact = dtype if dtype is torch.bool else torch.float64 if dtype.is_floating_point else torch.int64
    detached = insert_call(place, aten.detach.default, source)
    return insert_call(
        place, aten._to_copy.default, insert_call(place, aten.reshape.default, detached, []), dtype=exact
    )


def constant(place: torch.fx.Node, number: bool | int | float) -> torch.fx.Node:
    """Return a Python number as a tensor of bool, int64 or float64.

    Args:
        place: the node to insert in front of.
        number: the number.
    """
    dtypes = {bool: torch.bool, int: torch.int64, float: torch.float64}
    return insert_call(place, aten.scalar_tensor.default, number, dtype=dtypes[type(number)])


def _add(place: torch.fx.Node, condition: Any, message: str = _NO_MESSAGE) -> None:
    insert_call(place, internal_ops.must_compute, _checked(place, condition, message))


def _checked(place: torch.fx.Node, condition: Any, message: str) -> torch.fx.Node:
    """Return the number 1 behind a check of a condition."""
    holds = insert_call(place, aten.reshape.default, insert_call(place, aten.ne.Scalar, condition, 0), [])
    number = insert_call(place, aten._to_copy.default, holds, dtype=torch.int64)
    call = encode_call(_RAISES, [{"tensor": 0}, message], {}, random=False)
    check = Check(call, 0, source=None, dim=None, size=2, low=1, ignored=None, exact=True)
    return insert_call(place, internal_ops.checked_index, number, [number], check.to_json())


def _sizes(graph: torch.fx.Graph) -> frozenset[str]:
    """Return the symbols in the sizes of tensors."""
    values = (leaf for node in graph.nodes for leaf in optree.tree_leaves(node.meta.get("val")))
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return frozenset(name for tensor in tensors for size in tensor.shape for name in _symbols(size))


def _symbols(number: Any) -> Iterator[str]:
    """Yield the names in torch of the symbols that a number is computed from."""
    if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        yield from map(str, raw_expression(number).free_symbols)


def reads_of(condition: Any) -> Iterator[torch.fx.Node]:
    """Yield the nodes that read the numbers of a condition, or of a node of :data:`CONDITIONS`."""
    if not isinstance(condition, torch.fx.Node) or isinstance(condition.meta.get("val"), torch.Tensor):
        return
    if condition.target in READS:
        yield condition
        return
    for node in condition.all_input_nodes:
        yield from reads_of(node)


def _is_guess(condition: Any, reads: Collection[torch.fx.Node], sizes: Collection[str]) -> bool:
    names = {name for read in reads for name in _symbols(read.meta["val"])}
    return condition.target in _GUESSED and not names.isdisjoint(sizes)


class _Numbers:
    """Tensors that replace numbers.

    Args:
        place: the node to insert in front of.
    """

    def __init__(self, place: torch.fx.Node) -> None:
        self._place = place
        self._known: dict[torch.fx.Node, torch.fx.Node] = {}

    def tensor(self, number: Any) -> torch.fx.Node:
        """Return the tensor of a number, or of a node whose value is a number."""
        if not isinstance(number, torch.fx.Node):
            return constant(self._place, number)
        if number not in self._known:
            self._known[number] = self._compute(number)
        return self._known[number]

    def _compute(self, node: torch.fx.Node) -> torch.fx.Node:
        if node.target in READS:
            return read_number(self._place, node)
        if node.target is aten.sym_size.int:
            return insert_call(self._place, aten.scalar_tensor.default, node, dtype=torch.int64)
        if node.target is torch.sym_float:
            return insert_call(
                self._place, aten._to_copy.default, self.tensor(node.args[0]), dtype=torch.float64
            )
        if node.target in _COMPUTED:
            return insert_call(self._place, _COMPUTED[node.target], *map(self.tensor, node.args))
        raise UnsupportedOperatorError(
            f"{node.target} at {source_line(node)} computes a number that the model sets a condition on, and "
            f"no tensor is computed so. Set the condition on a tensor, by torch._assert_async(x.max() < 3)"
        )
