"""Decompositions of indexing and scattering."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch2ort.program.decomposition_table import decomposes

aten = torch.ops.aten


@decomposes(aten.index.Tensor)
def index(self: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Convert indices to int64, the only type that GatherND accepts."""
    wide = _wide(indices)
    return NotImplemented if wide is None else aten.index(self, wide)


@decomposes(aten.index_put.default)
def index_put(
    self: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
) -> torch.Tensor:
    """Convert indices to int64, the only type that ScatterND accepts."""
    wide = _wide(indices)
    return NotImplemented if wide is None else aten.index_put(self, wide, values, accumulate)


@decomposes(aten._unsafe_index_put.default)
def unsafe_index_put(
    self: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
) -> torch.Tensor:
    """Decompose like :func:`index_put`; torch's decomposition of ``unfold_backward`` makes one with int32."""
    wide = _wide(indices)
    return NotImplemented if wide is None else aten._unsafe_index_put(self, wide, values, accumulate)


@decomposes(aten.index_add.default)
def index_add(
    self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1
) -> torch.Tensor:
    """Decompose like :func:`index_put`."""
    if index.dtype != torch.int32:
        return NotImplemented  # type: ignore[no-any-return]
    return self.index_add(dim, index.long(), source, alpha=alpha)


def _wide(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None] | None:
    """Return the indices as int64 and masks unchanged; ``None`` if there is nothing to convert."""
    if not any(index is not None and index.dtype == torch.int32 for index in indices):
        return None
    return [i.long() if i is not None and i.dtype == torch.int32 else i for i in indices]


@decomposes(aten.take.default)
def take(self: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the elements at ``index``; torch's own decomposition reads the index if it is one number."""
    result: torch.Tensor = aten.index(self.reshape(-1), [index])
    return result


@decomposes(aten.scatter_reduce.two)
def scatter_reduce(
    self: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> torch.Tensor:
    """Divide a sum by a count for a mean, which ONNX does not have."""
    if reduce != "mean" or not self.dtype.is_floating_point:
        return NotImplemented  # type: ignore[no-any-return]
    total = self.scatter_reduce(dim, index, src, "sum", include_self=include_self)
    ones, counted = torch.ones_like(self), torch.ones_like(src)
    return total / ones.scatter_reduce(dim, index, counted, "sum", include_self=include_self)
