"""What is checked in each run of a ``forward`` that nobody could run at export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch2ort.errors import EngineError
from torch2ort.pythonop.site import Site


def watched(
    site: Site, forward: Callable[..., Any], setup_context: Callable[..., Any] | None
) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """``forward`` and ``setup_context`` that refuse what the graph was not built for.

    That ``forward`` writes to an argument, or returns other than tensors, the call policy itself refuses.
    """
    if setup_context is None:

        def watched_forward(ctx: Any, *arguments: Any) -> Any:
            outputs = forward(ctx, *arguments)
            _check(site, ctx, outputs)
            return outputs

        return watched_forward, None

    def watched_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        setup_context(ctx, inputs, output)
        _check(site, ctx, output)

    return forward, watched_setup


def _check(site: Site, ctx: Any, returned: Any) -> None:
    """Raise :class:`EngineError` if a floating-point output is marked as not differentiable."""
    outputs = returned if isinstance(returned, tuple) else (returned,)
    marked = {id(t) for t in ctx.non_differentiable or ()}
    for i, value in enumerate(outputs):
        if id(value) in marked and isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
            raise EngineError(
                f"{site.func_name}: forward marks output {i} as not differentiable, which nobody could see "
                f"at "
                f"export, as forward ran neither on fake tensors nor on made-up data of the sample's sizes. "
                f"Make it "
                f"run on one of them, or detach the output where the Function is called"
            )
