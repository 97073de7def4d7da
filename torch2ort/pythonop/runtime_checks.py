"""Checks in each run of a ``forward`` that an export could not observe completely."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch2ort.errors import EngineError
from torch2ort.pythonop.site import Site


def with_runtime_checks(
    site: Site, forward: Callable[..., Any], setup_context: Callable[..., Any] | None
) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """Return ``forward`` and ``setup_context`` that refuse results for which the graph was not built.

    The call policy itself refuses a ``forward`` that writes to an argument or returns other values than
    tensors.
    """
    if setup_context is None:

        def watched_forward(ctx: Any, *arguments: Any) -> Any:
            outputs = forward(ctx, *arguments)
            _check(site, ctx, arguments, outputs)
            return outputs

        return watched_forward, None

    def watched_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        setup_context(ctx, inputs, output)
        _check(site, ctx, inputs, output)

    return forward, watched_setup


def _check(site: Site, ctx: Any, arguments: Sequence[Any], returned: Any) -> None:
    """Raise :class:`EngineError` if the graph is not valid for the returned values."""
    outputs = returned if isinstance(returned, tuple) else (returned,)
    if not site.known_result.observed:
        _check_marks(site, ctx, outputs)
    if site.known_result.sizes:
        _check_sizes(site, arguments, outputs)
    for i, last in site.known_result.repeated:
        if outputs[i] is not outputs[last]:
            raise EngineError(
                f"{site.func_name}: forward returns two tensors as outputs {i} and {last}, but returned one "
                f"tensor for both when it was exported, of which the last output gets the gradient. Return "
                f"output {i} as a clone() always"
            )


def _check_marks(site: Site, ctx: Any, outputs: Sequence[Any]) -> None:
    marked = {id(t) for t in ctx.non_differentiable or ()}
    for i, value in enumerate(outputs):
        if id(value) in marked and isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
            raise EngineError(
                f"{site.func_name}: forward marks output {i} as not differentiable, which the export could "
                f"not detect, as forward ran neither on fake tensors nor on made-up data of the sample's "
                f"sizes. Make it run on one of them, or detach the output where the Function is called"
            )


def _check_sizes(site: Site, arguments: Sequence[Any], outputs: Sequence[Any]) -> None:
    tensors = [(i, value) for i, value in enumerate(outputs) if isinstance(value, torch.Tensor)]
    for (i, tensor), sizes in zip(tensors, site.known_result.sizes, strict=False):
        expected = [arguments[s[0]].shape[s[1]] if isinstance(s, tuple) else s for s in sizes]
        if any(e not in (None, size) for e, size in zip(expected, tensor.shape, strict=True)):
            raise EngineError(
                f"{site.func_name}: output {i} of forward has shape {list(tensor.shape)}, but the graph was "
                f"exported for {expected}: forward runs on real tensors only, and the model's code needs to "
                f"know the sizes of its outputs. Declare them with torch2ort.register_shape_inferer"
            )
