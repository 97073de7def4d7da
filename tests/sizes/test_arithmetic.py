"""Sums, products and comparisons of sizes that a trace caches equal those that it would compute again."""

from __future__ import annotations

import operator

import pytest
import torch

from torch2ort._torch.aot import symbolic_sizes
from torch2ort.sizes.unbacked_sizes import arithmetic_done_once

_OPERATIONS = {
    "sum": operator.add,
    "difference": operator.sub,
    "product": operator.mul,
    "larger": torch.sym_max,
    "smaller": torch.sym_min,
    "equal": operator.eq,
    "unequal": operator.ne,
    "less": operator.lt,
    "at most": operator.le,
    "more": operator.gt,
    "at least": operator.ge,
}


def sizes(*numbers: int) -> list[torch.SymInt]:
    """Symbols of a trace of their own, with these values in the sample."""
    return symbolic_sizes(numbers)[1]


@pytest.mark.parametrize("name", _OPERATIONS)
def test_each_time_gives_the_same_expression_as_the_first(name: str) -> None:
    compute = _OPERATIONS[name]
    a, b = sizes(5, 7)
    expected = [compute(x, y).node for x, y in ((a, b), (b, a), (a, 3), (a, a * 2))]
    with arithmetic_done_once():
        for _ in range(2):
            found = [compute(x, y).node for x, y in ((a, b), (b, a), (a, 3), (a, a * 2))]
            assert [(n.expr, n.hint, n.pytype) for n in found] == [
                (n.expr, n.hint, n.pytype) for n in expected
            ]


def test_what_a_size_is_found_to_be_meanwhile_holds_for_later_results() -> None:
    a, b = sizes(4, 4)
    with arithmetic_done_once():
        assert not (a + b).node.expr.is_number
        assert a == 4  # a guard, by which the symbol is a number from now on
        assert (a + a).node.maybe_as_int() == 8
        assert (a + b).node.expr.free_symbols == b.node.expr.free_symbols


def test_traces_do_not_share_results() -> None:
    (a,), (b,) = sizes(5), sizes(6)
    with arithmetic_done_once():
        first, second = a + 1, b + 1
    assert (first.node.shape_env, first.node.hint) == (a.node.shape_env, 6)
    assert (second.node.shape_env, second.node.hint) == (b.node.shape_env, 7)
