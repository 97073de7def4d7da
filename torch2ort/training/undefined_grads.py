"""Zeros in the place of gradients that autograd has not.

A gradient graph computes with numbers only. Where an operator's derivative is infinite it makes NaN of such
zeros, which is then added to what is a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch2ort.errors import EngineError


def refuse_nan(gradients: Iterable[torch.Tensor | None], why: str, way_in: str = "ORTModule") -> None:
    """Refuse a gradient that may be NaN by such zeros alone.

    Args:
        gradients: what a backward computed.
        why: whose gradient was missing, and what to do.
        way_in: what the user called.

    Raises:
        EngineError: one has a NaN.
    """
    found = [torch.isnan(gradient).any() for gradient in gradients if gradient is not None]
    # On a GPU the host waits once, for all of them.
    if found and bool(torch.stack(found).any()):
        raise EngineError(f"{way_in}: a gradient has a NaN, which eager PyTorch's may not have: {why}")


LEFT_OUT = (
    "a Function's backward returned None for an argument that needs a gradient, and the zeros in its place "
    "went through an operator whose derivative is infinite. Detach that argument before the Function"
)
