"""Values and gradients are eager PyTorch's at kinks, ties, zero, and very small and very large numbers."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F

import torch2ort
from tests.ops import special_points as sp

GROUPS = {
    "one operand": (sp.UNARY, (sp.FINITE,)),
    "infinities": (sp.UNARY, (sp.ENDLESS,)),
    "two operands": (sp.BINARY, (sp.FINITE, sp.FINITE.flip(0))),
    "equal operands": (sp.BINARY, (sp.FINITE, sp.FINITE)),
    "rows": (sp.OF_ROWS, (sp.ROWS,)),
    "smallest": (sp.UNARY, (sp.SMALLEST,)),
    "pairs of ends": (sp.BINARY, sp.PAIRS),
    "odd rows": (sp.OF_ROWS, (sp.ODD_ROWS,)),
}
CASES = [
    pytest.param(g, n, id=f"{g}, {n}")
    for g, (operators, _) in GROUPS.items()
    for n in operators
    if g != "infinities" or n not in sp.UNDEFINED_AT_INFINITY
]


@functools.cache
def module(*operators):
    """One graph for all points of the same operators."""
    chosen = next(known for known, _ in GROUPS.values() if tuple(known) == operators)
    return torch2ort.ORTModule(sp.Points(chosen))


@functools.cache
def found(group):
    operators, points = GROUPS[group]
    return sp.results(module(*operators), list(operators), points)


@functools.cache
def expected(group):
    operators, points = GROUPS[group]
    return sp.results(sp.Points(operators), list(operators), points)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("group", "name"), CASES)
def test_an_operator_is_equal_to_eager_at_its_special_points(group, name):
    for i, (one, other) in enumerate(zip(found(group)[name], expected(group)[name], strict=True)):
        if i > 0 and group in ("infinities", "pairs of ends", "odd rows"):
            # The gradient at NaN is undefined.
            if group == "pairs of ends":
                break
            numbers = ~GROUPS[group][1][0].isnan()
            numbers = numbers.all(-1) if group == "odd rows" else numbers
            one, other = one[numbers], other[numbers]
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("bag", [False, True])
def test_sparse_gradients_are_refused(bag):
    table = torch.nn.EmbeddingBag(5, 4, sparse=True) if bag else torch.nn.Embedding(5, 4, sparse=True)
    with pytest.raises(torch2ort.UnsupportedOperatorError) as caught:
        torch2ort.ORTModule(table)(torch.tensor([[0, 3]]))
    operator = "aten.embedding_bag.padding_idx" if bag else "aten.embedding.default"
    message = str(caught.value)
    assert message.startswith(f"{operator} at ")
    assert message.endswith(
        " has sparse=True, but the gradients of a graph are dense. Make the table with sparse=False, or put "
        "the look-up into a torch.autograd.Function"
    )


LOWEST = [[-math.inf] * 4, [-math.inf, math.nan, -math.inf, 1.0], [torch.finfo().min, -math.inf, 0.0, 2.0]]


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_maximum_of_windows_of_minus_infinity(dtype, positions):
    x = torch.tensor([LOWEST * 2], dtype=dtype)

    class Pools(torch.nn.Module):
        def forward(self, x):
            options = {"return_indices": positions}
            return (
                F.max_pool1d(x[0], 2, 1, **options),
                F.max_pool2d(x, 2, 1, 1, **options),
                F.max_pool3d(x[None], 2, 1, 1, **options),
                F.adaptive_max_pool2d(x, 2, **options),
            )

    exported = torch2ort.export(Pools(), x)
    torch.testing.assert_close(exported(x), Pools()(x), equal_nan=True)
