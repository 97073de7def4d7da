"""Detection of changes to a model after its first call: ``python -m tests.variants.guard_comparison``.

Each of the ways in ``model_changes`` is tried on an ORTModule and on torch.compile, and the call after the
change is compared with eager PyTorch. Prints a table in Markdown of the changes that not both detect, and
counts.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import torch2ort
from tests.variants.model_changes import IRRELEVANT, WAYS, Way

Wrap = Callable[[torch.nn.Module], Any]


def compiled(model: torch.nn.Module) -> Any:
    """Compile by dynamo, whose graphs run in eager PyTorch."""
    torch._dynamo.reset()
    return torch.compile(model, backend="eager")


WRAPPERS: dict[str, Wrap] = {"ORTModule": torch2ort.ORTModule, "torch.compile": compiled}


def gradients(module: Any, model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Return the result of a call, and the gradient of each parameter."""
    model.zero_grad()
    result = module(x)
    if result.requires_grad:
        result.square().sum().backward()
    return [result.detach(), *(parameter.grad for parameter in model.parameters())]


def is_same(actual: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    """Return True if two results are equal up to rounding."""
    if actual is None or expected is None:
        return actual is expected
    same_form = actual.shape == expected.shape and actual.dtype == expected.dtype
    return same_form and torch.allclose(actual, expected, rtol=1e-4, atol=1e-5)


def verdict(way: Way, wrap: Wrap) -> str:
    """Return the outcome of the call after a change: eager PyTorch's result, another, or an error."""
    torch.manual_seed(0)
    model, x = way.make(), torch.randn(3, 4)
    module = wrap(model)
    try:
        gradients(module, model, x)
        way.change(model)
        actual = gradients(module, model, x)
        expected = gradients(model, model, x)
    except Exception as error:
        return f"error: {type(error).__name__}"
    finally:
        way.restore()
    return "eager's" if all(map(is_same, actual, expected)) else "**old**"


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    rows = []
    for way in (*WAYS, *IRRELEVANT):
        with contextlib.redirect_stderr(io.StringIO()):
            rows.append((way.name, *(verdict(way, wrap) for wrap in WRAPPERS.values())))
    print(f"| change | {' | '.join(WRAPPERS)} |\n| --- |{' --- |' * len(WRAPPERS)}")
    for name, *verdicts in rows:
        if set(verdicts) != {"eager's"}:
            print(f"| {name} | {' | '.join(verdicts)} |")
    for position, name in enumerate(WRAPPERS, 1):
        print(f"\n{name}, of {len(rows)}: {dict(Counter(row[position] for row in rows))}")


if __name__ == "__main__":
    main()
