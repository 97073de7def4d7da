"""Matrix products that are added to a tensor with a weight, as PyTorch computes them.

With a weight of 0 the tensor is not read at all, so NaN in it does not propagate. ONNX's Gemm accepts a
weight, too, but onnxruntime's Gemm omits the weighted tensor from a product over no elements (1.20 to 1.31).
"""

from __future__ import annotations

import torch

from torch2ort.program.decomposition_table import decomposes

aten = torch.ops.aten


@decomposes(aten.addmm.default, aten.addmv.default, aten.baddbmm.default)
def add_product(
    self: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """Return ``beta * self + alpha * left @ right``."""
    return NotImplemented if beta == 1 else _weighted(self, left @ right, beta, alpha)


@decomposes(aten.addbmm.default)
def add_sum_of_products(
    self: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """Compute :func:`add_product` with the sum of the products over the first dimension."""
    return NotImplemented if beta == 1 else _weighted(self, (left @ right).sum(0), beta, alpha)


@decomposes(aten.addr.default)
def add_outer_product(
    self: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """Compute :func:`add_product` with the outer product."""
    return NotImplemented if beta == 1 else _weighted(self, left[:, None] * right, beta, alpha)


def _weighted(self: torch.Tensor, product: torch.Tensor, beta: float, alpha: float) -> torch.Tensor:
    scaled = product if alpha == 1 else product * alpha
    if beta:
        return self * beta + scaled
    # Its gradient is zeros; without this read it would have none.
    return torch.where(torch.zeros((), dtype=torch.bool, device=self.device), self, scaled)
