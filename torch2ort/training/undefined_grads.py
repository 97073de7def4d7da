"""Zeros in the place of gradients that autograd does not define.

A backward graph computes with numbers only. Where an operator's derivative is infinite, it turns such zeros
into NaN, which is then added to a defined gradient.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch2ort.errors import EngineError


def refuse_nan(gradients: Iterable[torch.Tensor | None], why: str, way_in: str = "ORTModule") -> None:
    """Refuse a gradient with NaN, which such zeros may have caused.

    Args:
        gradients: the results of a backward.
        why: names the undefined gradient and says what to do.
        way_in: the function that the user called.

    Raises:
        EngineError: a gradient has a NaN.
    """
    found = [torch.isnan(gradient).any() for gradient in gradients if gradient is not None]
    # On a GPU, the host waits once for all gradients.
    if found and bool(torch.stack(found).any()):
        raise EngineError(f"{way_in}: a gradient has a NaN, which eager PyTorch's may not have: {why}")


LEFT_OUT = (
    "a Function's backward returned None for an argument that needs a gradient, and the zeros in its place "
    "went through an operator whose derivative is infinite. Detach that argument before the Function"
)
