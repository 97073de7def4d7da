"""Families of models in half precision: as in eager PyTorch, or no further from float64 than eager is.

Operators that run in PyTorch's kernels give eager PyTorch's bits, unless a kernel adds up in another order.
So a value may differ by the bounds of its dtype in docs/precision.md. Where rounding adds up to more than
that, the value may be ``FURTHER`` times as far from float64 as eager PyTorch's own.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import torch2ort
from tests.models.families import FAMILIES
from tests.support.comparison import tensors_of

# Relative and absolute difference, from docs/precision.md.
BOUNDS = {torch.bfloat16: (3e-2, 1e-2), torch.float16: (4e-3, 1e-3), torch.float32: (1e-4, 1e-5)}
FURTHER = 2
# In float16 these branch on whether a value is infinite.
BRANCH_IN_FLOAT16 = frozenset({"longt5", "longt5, transient global", "bart", "marian"})


class Precision:
    """The precision that a model computes in.

    Args:
        dtype: dtype of parameters, buffers and inputs.
        autocast: dtype of torch.autocast around the call; ``None`` without autocast.
    """

    def __init__(self, dtype: torch.dtype, autocast: torch.dtype | None = None) -> None:
        self.dtype, self._autocast = dtype, autocast
        self.rounding = dtype if autocast is None else autocast

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """The context manager around a call."""
        return contextlib.nullcontext() if self._autocast is None else torch.autocast("cpu", self._autocast)


PRECISIONS = {
    "bfloat16": Precision(torch.bfloat16),
    "float16": Precision(torch.float16),
    "autocast": Precision(torch.float32, torch.bfloat16),
}
# The exact precisions to compare with. Some kernels of mixtures of experts, and XGLM's mask, lack float64.
EXACT = (Precision(torch.float64), Precision(torch.float32))


def step(model: Callable[..., Any], batch: Any, precision: Precision) -> dict[str, torch.Tensor | None]:
    """Outputs and gradients of one step of training."""
    tensors, schema = torch2ort.io_schema.flatten(copy.deepcopy(batch))
    given = torch2ort.io_schema.unflatten(
        [t.to(precision.dtype) if t.is_floating_point() else t for t in tensors], schema
    )
    torch.manual_seed(7)
    with precision.around():
        output = model(**given) if isinstance(given, dict) else model(*given)
    found = tensors_of(output)
    loss = getattr(output, "loss", None)
    if loss is None:
        loss = sum(t.float().square().mean() for t in found if t.requires_grad)
    loss.backward()
    results = {f"output {i}": t.detach() for i, t in enumerate(found)}
    return results | {f"gradient of {n}": p.grad for n, p in model.named_parameters()}


def difference(
    actual: torch.Tensor | None,
    expected: torch.Tensor | None,
    exact: torch.Tensor | None,
    rounds: torch.dtype,
) -> str:
    """Describe how a value differs from eager PyTorch's by more than it may; empty if it does not."""
    if actual is None or expected is None:
        return "" if actual is expected else f"{actual} is not {expected}"
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return f"{actual.dtype} {list(actual.shape)} is not {expected.dtype} {list(expected.shape)}"
    if not actual.is_floating_point():
        # Values that are rounded differently may have their maximum at another index.
        return "" if exact is not None and torch.equal(actual, expected) else "other numbers"
    relative, absolute = BOUNDS[rounds]
    if torch.allclose(actual, expected, rtol=relative, atol=absolute, equal_nan=True):
        return ""
    if exact is not None and exact.shape == actual.shape:
        own, other = ((t.double() - exact).norm() for t in (expected, actual))
        if other <= FURTHER * own:
            return ""
    return f"differs by {(actual.double() - expected.double()).abs().max():.1e}"


def exactly(name: str) -> dict[str, torch.Tensor | None]:
    """The same step in the most exact precision that the family supports."""
    for precision in EXACT:
        torch.manual_seed(0)
        model, batches = FAMILIES[name].make()
        with contextlib.suppress(RuntimeError):
            return step(model.train().to(precision.dtype), batches[0], precision)
    raise AssertionError(f"{name} runs in no type that is exact")


def refusal(name: str, precision: str) -> tuple[type[Exception], str] | None:
    """The message with which a family is refused."""
    if precision == "float16" and name in BRANCH_IN_FLOAT16:
        return torch2ort.ExportError, "the model's Python code depends on a value inside a tensor"
    return None


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "name", [pytest.param(f.name, marks=pytest.mark.long) for f in FAMILIES.values() if f.refused is None]
)
def test_family_in_half_precision(name, precision) -> None:
    how = PRECISIONS[precision]
    torch.manual_seed(0)
    model, batches = FAMILIES[name].make()
    model = model.train().to(how.dtype)
    module = torch2ort.ORTModule(copy.deepcopy(model))
    refused = refusal(name, precision)
    if refused is not None:
        with pytest.raises(refused[0], match=refused[1]):
            step(module, batches[0], how)
        return
    try:
        expected = step(model, batches[0], how)
    except (RuntimeError, TypeError, ValueError) as error:
        with pytest.raises((type(error), torch2ort.Torch2OrtError)):
            step(module, batches[0], how)
        return
    actual = step(module, batches[0], how)
    exact = exactly(name)
    assert actual.keys() == expected.keys()
    differences = {
        key: difference(actual[key], expected[key], exact.get(key), how.rounding) for key in expected
    }
    assert {key: text for key, text in differences.items() if text} == {}
