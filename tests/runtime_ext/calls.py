"""One call of a Function through the native policy, next to the same call in eager PyTorch.

The memory of a call's input tensors belongs to the runtime: these helpers overwrite it as soon as the call
has returned. Tensors that a Function keeps must survive that.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from torch2ort.pythonop.native import native

_serial = itertools.count()


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def overwrite(tensors: Sequence[torch.Tensor | None]) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.detach().fill_(float("nan") if tensor.is_floating_point() else 1)


def has_setup(function: type[torch.autograd.Function]) -> bool:
    return function.setup_context is not torch.autograd.Function.setup_context


def make_site(function: type[torch.autograd.Function], *arguments: Any, **overrides: Any) -> native.Site:
    """A site for ``function.apply(*arguments)``, made from one run on copies of the arguments."""
    copies = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    needs = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in arguments)
    context = native.Context(needs)
    with torch.no_grad():
        result = function.forward(*copies) if has_setup(function) else function.forward(context, *copies)
        if has_setup(function):
            function.setup_context(context, tuple(copies), result)
    values = result if isinstance(result, tuple) else (result,)
    positions = tuple(i for i, a in enumerate(arguments) if isinstance(a, torch.Tensor))
    tensor_outputs = tuple(i for i, v in enumerate(values) if isinstance(v, torch.Tensor))
    mutated = tuple(i for i in positions if copies[i]._version)
    extras = [copies[i] for i in mutated if not any(copies[i] is v for v in values)]
    tensors = [values[i] for i in tensor_outputs] + extras
    marked = {id(t) for t in context.non_differentiable or ()}
    without = (i for i in tensor_outputs if id(values[i]) in marked or not values[i].is_floating_point())
    settings: dict[str, Any] = {
        "name": f"{function.__module__}.{function.__qualname__}",
        "key": f"{function.__qualname__}/{next(_serial)}",
        "forward": function.forward,
        "setup_context": function.setup_context if has_setup(function) else None,
        "backward": function.backward,
        "arguments": tuple(None if isinstance(a, torch.Tensor) else a for a in arguments),
        "tensor_positions": positions,
        "needs_input_grad": needs,
        "input_dtypes": tuple(dtype_name(arguments[i]) for i in positions),
        "outputs": tuple(None if isinstance(v, torch.Tensor) else v for v in values),
        "tensor_outputs": tensor_outputs,
        "output_dtypes": tuple(map(dtype_name, tensors)),
        "output_ranks": tuple(t.dim() for t in tensors),
        "returns_tuple": isinstance(result, tuple),
        "training": True,
        "non_differentiable": tuple(without),
        "mutated": mutated,
    }
    return native.Site(**(settings | overrides))


def run_forward(callee: native.Site | native.Chain, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """One forward on copies of ``tensors``, whose memory is overwritten when it has returned."""
    given = [t.detach().clone() for t in tensors]
    with torch.no_grad():
        outputs = native.call_forward(callee, given)
        results = [t.clone() for t in outputs]
        overwrite(given)
    return results


def run_backward(
    callee: native.Site | native.Chain, *gradients: torch.Tensor | None
) -> list[torch.Tensor | None]:
    """One backward on copies of ``gradients``, whose memory is overwritten when it has returned."""
    given = [None if g is None else g.clone() for g in gradients]
    with torch.no_grad():
        outputs = native.call_backward(callee, given)
        results = [None if t is None else t.clone() for t in outputs]
        overwrite(given)
    return results


class InRun:
    """Makes a fresh run current for the length of a ``with`` block."""

    def __enter__(self) -> native.Run:
        self.run = native.Run()
        self.before = native.begin(self.run)
        return self.run

    def __exit__(self, *_: object) -> None:
        native.begin(self.before)
        self.run.clear()


def run_eager(
    function: type[torch.autograd.Function],
    arguments: Sequence[Any],
    gradients: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Tensor outputs of ``apply``, and the gradients of its tensor arguments."""
    leaves = [
        a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a
        for a in arguments
    ]
    result = function.apply(*leaves)
    values = [v for v in (result if isinstance(result, tuple) else (result,)) if isinstance(v, torch.Tensor)]
    pairs = [(v, g) for v, g in zip(values, gradients, strict=True) if g is not None]
    if pairs:
        torch.autograd.backward([v for v, _ in pairs], [g for _, g in pairs])
    return [v.detach() for v in values], [a.grad for a in leaves if isinstance(a, torch.Tensor)]


def run_native(
    site: native.Site, arguments: Sequence[Any], gradients: Sequence[torch.Tensor | None]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Return what :func:`run_eager` returns, from the native policy."""
    with InRun():
        outputs = run_forward(site, *(a for a in arguments if isinstance(a, torch.Tensor)))
        return outputs, run_backward(site, *gradients)


def assert_same(found: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]) -> None:
    """Assert equal bits; an undefined gradient equals zeros, as a runtime has no undefined values."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        if ours is None or theirs is None:
            assert ours is None or not ours.any()
            assert theirs is None
        else:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def check_against_eager(
    function: type[torch.autograd.Function],
    *arguments: Any,
    gradients: Sequence[torch.Tensor | None],
    steps: int = 3,
    **overrides: Any,
) -> native.Site:
    """Run a few steps both ways on changing data and compare outputs and gradients."""
    site = make_site(function, *arguments, **overrides)
    for step in range(steps):
        changed = [
            (a * (step + 1)).detach().requires_grad_(a.requires_grad)
            if isinstance(a, torch.Tensor) and a.is_floating_point()
            else a
            for a in arguments
        ]
        expected = run_eager(function, changed, gradients)
        found = run_native(site, changed, gradients)
        assert_same(found[0], expected[0])
        assert_same(found[1], expected[1])
    return site


def error_of(call: Any, *args: Any) -> Exception:
    """The exception that ``call(*args)`` raises."""
    try:
        call(*args)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")
