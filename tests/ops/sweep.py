"""Runs snippets in eager PyTorch and on ONNX Runtime, and returns the outcome of each."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import torch2ort
from tests.ops.snippets import Snippet

RTOL, ATOL = 1e-4, 1e-5
STEPS = 2


@dataclass(frozen=True)
class Outcome:
    """The outcome of one snippet.

    Attributes:
        state: ``equal`` to eager, ``refused`` with an ExportError, or ``different``.
        detail: the error, or the difference.
        kernels: ATen operators that ran in PyTorch's kernels.
    """

    state: str
    detail: str = ""
    kernels: tuple[str, ...] = ()


class Several(torch.nn.Module):
    """Several snippets of one input and one parameter."""

    def __init__(self, snippets: Mapping[str, Snippet]) -> None:
        super().__init__()
        self.snippets = dict(snippets)
        self.scale = torch.nn.Parameter(torch.linspace(0.7, 1.3, 8))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        """The result of each snippet, by name."""
        h = x * self.scale
        results = {name: snippet(h) for name, snippet in self.snippets.items()}
        return {n: tuple(r) if isinstance(r, (tuple, list)) else r for n, r in results.items()}


def sample(step: int) -> torch.Tensor:
    """Random numbers, some zero, some equal to each other."""
    x = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(7 + step))
    x[0, 0, :3] = 0
    x[1, 2] = x[1, 3]
    x[:, 4] = x[:, 5]
    return x.requires_grad_()


def run(snippets: Mapping[str, Snippet]) -> Outcome:
    """The outcome of ``snippets`` together, as one model."""
    with warnings.catch_warnings():
        # PyTorch's warnings about the snippets themselves: deprecations, resized outputs.
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", FutureWarning)
        eager = _steps(Several(snippets))
        model = torch2ort.ORTModule(Several(snippets))
        try:
            actual = _steps(model)
        except torch2ort.ExportError as error:
            return Outcome("refused", str(error))
    if isinstance(eager, str) or isinstance(actual, str):
        # Of several snippets only the first error is known.
        same = actual == eager and len(snippets) == 1
        return Outcome("equal") if same else Outcome("different", f"{actual} instead of {eager}")
    for one, other in zip(actual, eager, strict=True):
        for what, value in other.items():
            difference = _difference(one[what], value)
            if difference:
                return Outcome("different", f"{what}: {difference}")
    assert model.exported is not None
    return Outcome("equal", kernels=tuple(sorted(set(_kernels(model.exported)))))


def sweep(snippets: Mapping[str, Snippet], size: int = 12) -> dict[str, Outcome]:
    """The outcome of each snippet; they are run ``size`` at a time, and one by one where that fails."""
    outcomes: dict[str, Outcome] = {}
    names = list(snippets)
    for start in range(0, len(names), size):
        part = names[start : start + size]
        together = _run_or_fail({n: snippets[n] for n in part})
        if together.state == "equal":
            outcomes.update(dict.fromkeys(part, together))
        else:
            outcomes.update({n: _run_or_fail({n: snippets[n]}) for n in part})
    return outcomes


def _run_or_fail(snippets: Mapping[str, Snippet]) -> Outcome:
    try:
        return run(snippets)
    except Exception as error:
        return Outcome("different", f"{type(error).__name__}: {error}")


def _steps(model: torch.nn.Module) -> list[dict[str, torch.Tensor | None]] | str:
    """The results of the steps, or PyTorch's error for a missing derivative, as of aminmax in torch 2.11."""
    try:
        return [_step(model, i) for i in range(STEPS)]
    except RuntimeError as error:
        if not str(error).startswith("derivative for "):
            raise
        return str(error)


def _step(model: torch.nn.Module, step: int) -> dict[str, torch.Tensor | None]:
    x = sample(step)
    model.scale.grad = None
    torch.manual_seed(step + 1)
    results = model(x)
    tensors = {f"output {name}": t for name, t in _tensors(results)}
    found: dict[str, torch.Tensor | None] = {name: t.detach().clone() for name, t in tensors.items()}
    found |= {f"{name}, requires_grad": torch.tensor(t.requires_grad) for name, t in tensors.items()}
    weights = torch.Generator().manual_seed(step)
    pairs = [
        (t, torch.randn(t.shape, generator=weights, dtype=torch.float64).to(t.dtype))
        for t in tensors.values()
        if t.is_floating_point()
    ]
    pairs = [(t, g) for t, g in pairs if t.requires_grad]
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
    return {**found, "gradient of the input": x.grad, "gradient of the parameter": model.scale.grad}


def _tensors(results: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in results.items():
        for i, tensor in enumerate(value if isinstance(value, tuple) else (value,)):
            yield (f"{name} [{i}]" if isinstance(value, tuple) else name), tensor


def _difference(actual: torch.Tensor | None, expected: torch.Tensor | None) -> str:
    if actual is None or expected is None:
        return "" if actual is expected else f"{actual} instead of {expected}"
    try:
        torch.testing.assert_close(actual, expected, rtol=RTOL, atol=ATOL, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""


def _kernels(exported: torch2ort.ExportedModel) -> Iterator[str]:
    for node in exported.proto.graph.node:
        if b"DropoutNoise" in _attribute(node, "func_name"):
            yield "dropout's noise"
        for attribute in node.attribute:
            if attribute.name == "site" and b"Kernel" in _attribute(node, "func_name"):
                text = json.loads(attribute.s)["arguments"][0]
                match = re.search(r'"operator": "([\w.]+)"', text if isinstance(text, str) else text["str"])
                assert match is not None
                yield match[1]


def _attribute(node: Any, name: str) -> bytes:
    return next((a.s for a in node.attribute if a.name == name), b"")
