"""Operators in half precision on an ORTModule: eager's bits, as PyTorch's kernels run."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import torch2ort
from tests.ops import dtypes

pytestmark = pytest.mark.joint("it alone trains in half precision")
HALF = (torch.bfloat16, torch.float16)
SAMPLED = 12


class Apart(torch.nn.Module):
    """Several operators, each of tensors of its own, so that no gradients are added up."""

    def __init__(self, operators: dict[str, dtypes.Binary]) -> None:
        super().__init__()
        self.operators = operators

    def forward(self, xs: list[torch.Tensor], ys: list[torch.Tensor]) -> dict[str, Any]:
        """The result of each, by name."""
        results = {n: f(x, y) for (n, f), x, y in zip(self.operators.items(), xs, ys, strict=True)}
        return {n: tuple(r) if isinstance(r, (tuple, list)) else r for n, r in results.items()}


def outcome(names: list[str], dtype: torch.dtype) -> dict[str, str]:
    """What differs from eager in results or gradients, by the operator's name."""
    known = dtypes.of_dtype(dtype)
    model = Apart({name: known[name] for name in names})
    ways: list[dict[str, Any]] = []
    for module in (torch2ort.ORTModule(copy.deepcopy(model)), model):
        xs, ys = ([t.clone().requires_grad_() for _ in names] for t in dtypes.operands(dtype))
        results = module(xs, ys)
        flat = [t for r in results.values() for t in (r if isinstance(r, tuple) else (r,))]
        trained = [t for t in flat if t.requires_grad]
        torch.autograd.backward(trained, [torch.ones_like(t) for t in trained])
        ways.append({n: (results[n], x.grad, y.grad) for n, x, y in zip(names, xs, ys, strict=True)})
    found, expected = ways
    return {
        n: text
        for n in names
        for a, e in zip(found[n], expected[n], strict=True)
        if (text := _difference(a, e))
    }


def _difference(one: Any, other: Any) -> str:
    if one is None or other is None:
        return "" if one is other else f"{one} is not {other}"
    try:
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    except AssertionError as error:
        return str(error)
    return ""


def _takes_gradients(operator: dtypes.Binary, dtype: torch.dtype) -> bool:
    """Whether eager differentiates the operator with respect to both operands."""
    try:
        results = operator(*(t.clone().requires_grad_() for t in dtypes.operands(dtype)))
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if result.requires_grad:
                result.sum().backward(retain_graph=True)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "every", [pytest.param(SAMPLED, id="sampled"), pytest.param(1, id="all", marks=pytest.mark.long)]
)
def test_operators_give_eagers_bits(every, dtype) -> None:
    names = [name for name, operator in dtypes.of_dtype(dtype).items() if _takes_gradients(operator, dtype)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert outcome(names[::every], dtype) == {}
