"""Operators in half precision on an ORTModule give eager PyTorch's bits, as its kernels run."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torch2ort
from tests.ops import dtypes

HALF = (torch.bfloat16, torch.float16)
SAMPLED = 12
_GRID = torch.linspace(-0.9, 0.8, 36).reshape(1, 3, 6, 2)
_SPACES = {
    "linear": (12,),
    "bilinear": (3, 4),
    "bicubic": (3, 4),
    "nearest-exact": (3, 4),
    "nearest": (2, 2, 3),
}


def _resize(mode: str, by: str, values: tuple[Any, ...]) -> dtypes.Binary:
    space = _SPACES[mode]
    return lambda x, y: F.interpolate(x.reshape(1, 1, *space), mode=mode, **{by: values[-len(space) :]})


# Operators that depend on the form of an argument: sizes or factors, a number outside of the dtype's range.
OF_FORM: dict[str, dtypes.Binary] = {
    **{
        f"interpolate, {mode} by {by}": _resize(mode, by, values)
        for mode in _SPACES
        for by, values in {"size": (2, 7, 5), "scale_factor": (1.0, 1.7, 0.6)}.items()
    },
    "interpolate, trilinear": lambda x, y: F.interpolate(
        x.reshape(1, 1, 2, 2, 3), (3, 5, 4), mode="trilinear"
    ),
    "interpolate, bicubic between corners": lambda x, y: F.interpolate(
        x[None, None], (7, 5), mode="bicubic", align_corners=True
    ),
    "softshrink": lambda x, y: F.softshrink(torch.cat((x, x.new_tensor([[0.1, -0.1, 0.3, 1.7]]))), 0.1),
    "hardshrink": lambda x, y: F.hardshrink(torch.cat((x, x.new_tensor([[0.1, -0.1, 0.3, 1.7]]))), 0.1),
    **{
        f"grid_sample, {mode}": lambda x, y, mode=mode: F.grid_sample(
            x[None, None], _GRID.to(x.dtype), mode=mode, align_corners=False
        )
        for mode in ("bilinear", "nearest", "bicubic")
    },
    "adaptive_avg_pool2d": lambda x, y: F.adaptive_avg_pool2d(x[None], (2, 3)),
    "adaptive_max_pool2d": lambda x, y: F.adaptive_max_pool2d(x[None], (2, 3)),
    "embedding_bag": lambda x, y: F.embedding_bag(torch.tensor([[0, 2], [1, 1]]), x, mode="sum"),
    "view of nothing": lambda x, y: (x * y)[:0].view(5, 2, 0, 4) * y[0],
    "group_norm of groups": lambda x, y: F.group_norm(x.reshape(1, 4, 3), 2, y[0], y[1]),
}
DROPOUTS: dict[str, dtypes.Binary] = {
    f"{name}, {p}": lambda x, y, p=p, drop=drop: drop(x, y, p)
    for p in (0.1, 0.3, 0.5, 1.0)
    for name, drop in {
        "dropout": lambda x, y, p: F.dropout(x, p),
        "alpha_dropout": lambda x, y, p: F.alpha_dropout(x, min(p, 0.9)),
        "dropout1d": lambda x, y, p: F.dropout1d(x[None], p),
        "dropout2d": lambda x, y, p: F.dropout2d(x.reshape(1, 4, 1, 3), p),
        "dropout3d": lambda x, y, p: F.dropout3d(x.reshape(1, 4, 1, 1, 3), p),
        "native_dropout": lambda x, y, p: torch.native_dropout(x, p, True)[0],
    }.items()
}


class Apart(torch.nn.Module):
    """Several operators, each of tensors of its own, so that no gradients are added up."""

    def __init__(self, operators: dict[str, dtypes.Binary]) -> None:
        super().__init__()
        self.operators = operators

    def forward(self, xs: list[torch.Tensor], ys: list[torch.Tensor]) -> dict[str, Any]:
        """The result of each, by name."""
        results = {n: f(x, y) for (n, f), x, y in zip(self.operators.items(), xs, ys, strict=True)}
        return {n: tuple(r) if isinstance(r, (tuple, list)) else r for n, r in results.items()}


def outcome(operators: dict[str, dtypes.Binary], dtype: torch.dtype) -> dict[str, str]:
    """Differences from eager PyTorch in results or gradients, by the operator's name."""
    model, names = Apart(operators), list(operators)
    ways: list[dict[str, Any]] = []
    for module in (torch2ort.ORTModule(copy.deepcopy(model)), model):
        xs, ys = ([t.clone().requires_grad_() for _ in names] for t in dtypes.operands(dtype))
        torch.manual_seed(0)
        results = module(xs, ys)
        flat = [t for r in results.values() for t in (r if isinstance(r, tuple) else (r,))]
        trained = [t for t in flat if t.requires_grad]
        torch.autograd.backward(trained, [dtypes.gradient(t) for t in trained])
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
    """Return True if eager PyTorch differentiates the operator with respect to both operands."""
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
    known = dtypes.of_dtype(dtype)
    names = [name for name, operator in known.items() if _takes_gradients(operator, dtype)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert outcome({name: known[name] for name in names[::every]}, dtype) == {}


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_operators_stay_whole_whatever_the_form_of_their_arguments(dtype) -> None:
    assert outcome(OF_FORM, dtype) == {}


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64], ids=str)
def test_dropout_multiplies_gradients_with_the_noise_of_forward(dtype) -> None:
    assert outcome(DROPOUTS, dtype) == {}
