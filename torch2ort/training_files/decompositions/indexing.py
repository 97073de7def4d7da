"""The gradients of look-ups: sums over places that are named more than once."""

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
    """Each row gets the sum of the gradients of those that looked it up."""
    if scale_grad_by_freq:
        return NotImplemented  # type: ignore[no-any-return]
    width = grad_output.shape[-1]
    rows = indices.reshape(-1).long()
    given = grad_output.reshape(-1, width)
    if padding_idx >= 0:
        given = torch.where((rows == padding_idx).unsqueeze(1), torch.zeros_like(given[:1]), given)
    table = grad_output.new_zeros(num_weights, width)
    # Element by element, in order: of rows at once, ONNX Runtime adds several to one at the same time.
    return table.scatter_add(0, rows.unsqueeze(1).expand(given.shape), given)


@derives(aten.index_add.default)
def index_add(
    self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1
) -> torch.Tensor:
    """Element by element, too."""
    if not self.dim():
        return NotImplemented  # type: ignore[no-any-return]
    rank = self.dim()
    shape = [-1 if axis == dim % rank else 1 for axis in range(rank)]
    places = index.long().reshape(shape).expand(source.shape)
    return self.scatter_add(dim, places, source if alpha == 1 else source * alpha)
