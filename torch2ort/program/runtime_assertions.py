"""Conditions that a model sets on values: ``torch._check(n.max().item() < 3)``, ``torch._assert_async``.

torch.export writes each as a node that gives nothing, which a graph would lack. Here it becomes the check of
an index: a number that is 1 where the condition holds, and no other number is allowed.

Conditions on sizes alone stay out: what torch.export took for granted of them, kernels look at themselves.
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
# What a program says of numbers, and computes nothing by.
CONDITIONS = (
    _ON_NUMBERS,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
)
_RAISES = aten._assert_async.msg
# What Python computes of numbers -> the same of tensors without dimensions.
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
# They may be torch.export's own guess of a size, where eager has a way for either outcome.
_GUESSED = (operator.eq, operator.or_)


def keep_value_checks(graph: torch.fx.Graph) -> None:
    """Have each condition on values raise its error where it does not hold.

    Args:
        graph: a program's nodes; changed in place. The conditions' own nodes stay.

    Raises:
        UnsupportedOperatorError: a condition is computed of numbers in a way that no tensors are.
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
    """Take away the conditions that :func:`keep_value_checks` leaves out.

    Args:
        graph: what it had; changed in place.
    """
    checked = _checked_conditions(graph)
    for node in list(graph.nodes):
        if node.target is _ON_NUMBERS and node not in checked:
            graph.erase_node(node)


def _checked_conditions(graph: torch.fx.Graph) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """The conditions on numbers that are read out of tensors, and where each of these is read."""
    asserted = graph.find_nodes(op="call_function", target=_ON_NUMBERS)
    sizes = _sizes(graph) if asserted else frozenset()
    reads = {node: list(dict.fromkeys(reads_of(node.args[0]))) for node in asserted}
    return {
        node: found for node, found in reads.items() if found and not _is_guess(node.args[0], found, sizes)
    }


def drop_conditions(graph: torch.fx.Graph) -> None:
    """Take away the conditions on numbers, and numbers that nobody reads then.

    Args:
        graph: what :func:`keep_value_checks` had; changed in place.
    """
    for node in reversed(graph.nodes):
        is_unread = node.op == "call_function" and is_number(node.meta.get("val")) and not node.users
        if is_unread or node.target in CONDITIONS:
            graph.erase_node(node)


def within_bounds(
    number: torch.fx.Node, read: torch.fx.Node, low: int | None, high: int | None
) -> torch.fx.Node:
    """The number again, behind a check of what a trace knows of it.

    Args:
        number: a tensor of int64 without dimensions.
        read: what reads it in the program, in front of which it goes.
        low: what it is never below; ``None`` if it may be any.
        high: what it is never above, likewise.
    """
    sides = [(aten.ge.Scalar, low), (aten.le.Scalar, high)]
    holds = [insert_call(read, side, number, bound) for side, bound in sides if bound is not None]
    if not holds:
        return number
    both = holds[0] if len(holds) == 1 else insert_call(read, aten.logical_and.default, *holds)
    one = _checked(read, both, _DOES_NOT_HOLD + source_line(read))
    return insert_call(read, aten.mul.Tensor, number, one)


def read_number(place: torch.fx.Node, read: torch.fx.Node) -> torch.fx.Node:
    """The tensor of a number that is read out of one, as exact as Python's: bool, int64 or float64.

    Args:
        place: what it goes in front of.
        read: such a node.
    """
    (source,) = read.all_input_nodes
    dtype = source.meta["val"].dtype
    exact = dtype if dtype is torch.bool else torch.float64 if dtype.is_floating_point else torch.int64
    detached = insert_call(place, aten.detach.default, source)
    return insert_call(
        place, aten._to_copy.default, insert_call(place, aten.reshape.default, detached, []), dtype=exact
    )


def constant(place: torch.fx.Node, number: bool | int | float) -> torch.fx.Node:
    """The tensor of a number, likewise.

    Args:
        place: what it goes in front of.
        number: the number.
    """
    dtypes = {bool: torch.bool, int: torch.int64, float: torch.float64}
    return insert_call(place, aten.scalar_tensor.default, number, dtype=dtypes[type(number)])


def _add(place: torch.fx.Node, condition: Any, message: str = _NO_MESSAGE) -> None:
    insert_call(place, internal_ops.must_compute, _checked(place, condition, message))


def _checked(place: torch.fx.Node, condition: Any, message: str) -> torch.fx.Node:
    """The number 1 behind a check of a condition."""
    holds = insert_call(place, aten.reshape.default, insert_call(place, aten.ne.Scalar, condition, 0), [])
    number = insert_call(place, aten._to_copy.default, holds, dtype=torch.int64)
    call = encode_call(_RAISES, [{"tensor": 0}, message], {}, random=False)
    check = Check(call, 0, source=None, dim=None, size=2, low=1, ignored=None, exact=True)
    return insert_call(place, internal_ops.checked_index, number, [number], check.to_json())


def _sizes(graph: torch.fx.Graph) -> frozenset[str]:
    """The symbols in sizes of tensors."""
    values = (leaf for node in graph.nodes for leaf in optree.tree_leaves(node.meta.get("val")))
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return frozenset(name for tensor in tensors for size in tensor.shape for name in _symbols(size))


def _symbols(number: Any) -> Iterator[str]:
    """The names in torch of what a number is computed of."""
    if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        yield from map(str, raw_expression(number).free_symbols)


def reads_of(condition: Any) -> Iterator[torch.fx.Node]:
    """Where the numbers are read that a condition is computed of, or one of :data:`CONDITIONS` is on."""
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
    """Tensors in the place of numbers.

    Args:
        place: what they are computed in front of.
    """

    def __init__(self, place: torch.fx.Node) -> None:
        self._place = place
        self._known: dict[torch.fx.Node, torch.fx.Node] = {}

    def tensor(self, number: Any) -> torch.fx.Node:
        """That of a number, or of a node that gives one."""
        if not isinstance(number, torch.fx.Node):
            return constant(self._place, number)
        if number not in self._known:
            self._known[number] = self._computed(number)
        return self._known[number]

    def _computed(self, node: torch.fx.Node) -> torch.fx.Node:
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
