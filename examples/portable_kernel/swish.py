"""Swish as a Function: the body of its node in a portable file, and the name of a kernel for it."""

from __future__ import annotations

import torch
from torch import Tensor


class Swish(torch.autograd.Function):
    """``x * sigmoid(beta * x)`` (Ramachandran et al., 2017)."""

    @staticmethod
    def forward(ctx, x: Tensor, beta: float) -> Tensor:
        gate = torch.sigmoid(beta * x)
        ctx.save_for_backward(x, gate)
        ctx.beta = beta
        return x * gate

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        x, gate = ctx.saved_tensors
        return grad * gate * (1 + ctx.beta * x * (1 - gate)), None
