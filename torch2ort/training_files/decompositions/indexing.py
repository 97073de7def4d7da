"""The gradients of look-ups: sums over indices that may occur more than once."""

from __future__ import annotations

import torch

from torch2ort.training_files.decompositions.registry import derives

aten = torch.ops.aten


@derives(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    grad_output: torch.Tensor,
    indices: torch.Tensor,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> torch.Tensor:
    """Sum the gradients of all look-ups of each row."""
    if scale_grad_by_freq:
        return NotImplemented  # type: ignore[no-any-return]
    width = grad_output.shape[-1]
    rows = indices.reshape(-1).long()
    given = grad_output.reshape(-1, width)
    if padding_idx >= 0:
        given = torch.where((rows == padding_idx).unsqueeze(1), torch.zeros_like(given[:1]), given)
    table = grad_output.new_zeros(num_weights, width)
    # Element by element, in order: ONNX Runtime adds whole rows concurrently, also to the same row.
    return table.scatter_add(0, rows.unsqueeze(1).expand(given.shape), given)


@derives(aten.index_add.default)
def index_add(
    self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1
) -> torch.Tensor:
    """Add to rows element by element, as :func:`embedding_dense_backward` does."""
    if not self.dim():
        return NotImplemented  # type: ignore[no-any-return]
    rank = self.dim()
    shape = [-1 if axis == dim % rank else 1 for axis in range(rank)]
    places = index.long().reshape(shape).expand(source.shape)
    return self.scatter_add(dim, places, source if alpha == 1 else source * alpha)
