"""A Function's own ``backward`` behind operators that compute its outputs.

The site gets the call's arguments and, after them, the outputs that an exporter's operators computed. Its
forward passes those on. Its backward runs the Function's ``forward`` on the same arguments to learn what that
saves, then the Function's ``backward``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch2ort.pythonop.abstract_run.observe import run_forward
from torch2ort.pythonop.native import native
from torch2ort.pythonop.site import TENSOR, Site


def own_gradient(site: Site, backward: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of a site whose outputs are computed by an exporter's operators.

    Args:
        site: resolved to a class, with :attr:`Site.mapped` set.
        backward: the Function's own.
    """
    outputs = site.known_result.outputs
    original = site.own_arguments
    count = len(original)
    computed = len(site.arguments) - count

    def forward(ctx: Any, *arguments: Any) -> Any:
        ctx.save_for_backward(*(a for a in arguments[:count] if isinstance(a, torch.Tensor)))
        # Whether missing gradients become zeros is for the Function's own context to say.
        ctx.set_materialize_grads(False)
        supply = iter(arguments[count:])
        values = tuple(next(supply) if value is TENSOR else value for value in outputs)
        return values if site.known_result.returns_tuple else values[0]

    def recomputing_backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        own = native.Context(site.needs_input_grad[:count])
        returned = run_forward(site, own, [next(saved) if a is TENSOR else a for a in original])
        if own.materialize_grads:
            values = returned if isinstance(returned, tuple) else (returned,)
            gradients = tuple(
                torch.zeros_like(v) if g is None and isinstance(v, torch.Tensor) else g
                for g, v in zip(gradients, values, strict=True)
            )
        found = backward(own, *gradients)
        found = found if isinstance(found, tuple) else (found,)
        return (*found[:count], *[None] * (count - len(found)), *[None] * computed)

    return forward, recomputing_backward
