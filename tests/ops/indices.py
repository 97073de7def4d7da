"""Operators that take indices, each with indices that eager PyTorch accepts and with some that it refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Use:
    """One use of an operator.

    Attributes:
        call: called with a float tensor and an int64 tensor.
        shape: shape of the float tensor.
        index: indices that eager PyTorch accepts.
        others: numbers to replace the last index with; eager PyTorch refuses most of them.
    """

    call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    shape: tuple[int, ...]
    index: torch.Tensor
    others: tuple[int, ...]

    def with_last(self, number: int) -> torch.Tensor:
        """Return the indices, the last of which is replaced by a number."""
        index = self.index.clone()
        index.view(-1)[-1] = number
        return index


def _set(h: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    h = h * 1
    h[i] = 0.5
    return h


_HUGE = 10**9
_ROWS = torch.tensor([0, 3, 2])
_GRID = torch.tensor([[0, 1, 2, 1], [1, 0, 2, 0]])
_OF_5, _OF_4 = (-1, _HUGE), (-1, 4)


def _on(shape: tuple[int, ...], index: torch.Tensor, *others: int) -> Callable[..., Use]:
    return lambda call: Use(call, shape, index, others)


_rows = _on((5, 4), _ROWS, *_OF_5)
_counted_from_the_end = _on((5, 4), _ROWS, -1, -6, 5)
_grid = _on((5, 4), _GRID, *_OF_4)
_classes = _on((3, 4), _ROWS, *_OF_4)

USES: dict[str, Use] = {
    "embedding": _rows(lambda h, i: F.embedding(i, h)),
    "embedding, padding": _rows(lambda h, i: F.embedding(i, h, padding_idx=1)),
    "embedding, int32": _rows(lambda h, i: F.embedding(i.int(), h)),
    "embedding_bag": _rows(lambda h, i: F.embedding_bag(i, h, torch.tensor([0, 2]))),
    "index_select": _rows(lambda h, i: h.index_select(0, i)),
    "gather": _grid(lambda h, i: h.gather(1, i)),
    "take": _on((5, 4), _GRID, -1, -21, 20)(lambda h, i: h.take(i)),
    "take_along_dim": _on((2, 4), _GRID, *_OF_4)(lambda h, i: torch.take_along_dim(h, i, 1)),
    "brackets": _counted_from_the_end(lambda h, i: h[i]),
    "brackets, second axis": _on((5, 4), _ROWS, -1, -5, 4)(lambda h, i: h[None, :, i]),
    "brackets, twice one index": _on((5, 4), _ROWS, -1, -5, 4, 5)(lambda h, i: h[i, i]),
    "assignment": _counted_from_the_end(_set),
    "index_put": _counted_from_the_end(lambda h, i: h.index_put((i,), h[:3] * 2)),
    "index_put, adding": _counted_from_the_end(lambda h, i: h.index_put((i,), h[:3], accumulate=True)),
    "index_add": _rows(lambda h, i: h.index_add(0, i, h[:3] * 2)),
    "index_copy": _rows(lambda h, i: h.index_copy(0, i, h[:3] * 2)),
    "index_fill": _counted_from_the_end(lambda h, i: h.index_fill(0, i, 2.0)),
    "index_reduce": _rows(lambda h, i: h.index_reduce(0, i, h[:3] * 2, "mean")),
    "repeat_interleave": _on((3, 4), _ROWS, -1)(lambda h, i: h.repeat_interleave(i, 0)),
    "repeat_interleave, int32": _on((3, 4), _ROWS, -1)(lambda h, i: h.repeat_interleave(i.int(), 0)),
    "put": _on((5, 4), _ROWS, -1, -21, 20)(lambda h, i: h.put(i, h[:3, 0])),
    "scatter": _grid(lambda h, i: h.scatter(1, i, h[:2] * 2)),
    "scatter, a number": _grid(lambda h, i: h.scatter(1, i, 2.0)),
    "scatter_add": _grid(lambda h, i: h.scatter_add(1, i, h[:2] * 2)),
    **{
        f"scatter_reduce, {reduce}{'' if own else ' of the others'}": _grid(
            lambda h, i, reduce=reduce, own=own: h.scatter_reduce(1, i, h[:2] * 2, reduce, include_self=own)
        )
        for reduce in ("sum", "prod", "mean", "amax", "amin")
        for own in (True, False)
    },
    "one_hot": _classes(lambda h, i: h * F.one_hot(i, 4)),
    "cross_entropy": _classes(lambda h, i: F.cross_entropy(h, i)),
    "cross_entropy, weights": _classes(lambda h, i: F.cross_entropy(h, i, torch.arange(1.0, 5))),
    "cross_entropy, smoothed": _classes(lambda h, i: F.cross_entropy(h, i, label_smoothing=0.1)),
    "cross_entropy, images": _classes(lambda h, i: F.cross_entropy(h[..., None, None], i[:, None, None])),
    "cross_entropy, ignored": _on((3, 4), torch.tensor([-1, 3, 2]), -1, -2, _HUGE)(
        lambda h, i: F.cross_entropy(h, i, ignore_index=-1, reduction="sum")
    ),
    "nll_loss": _classes(lambda h, i: F.nll_loss(h, i)),
    "nll_loss, weights": _on((3, 4), torch.tensor([-100, 3, 2]), *_OF_4)(
        lambda h, i: F.nll_loss(h, i, torch.arange(1.0, 5))
    ),
    "multi_margin_loss": _classes(lambda h, i: F.multi_margin_loss(h, i)),
    "multilabel_margin_loss": _on((3, 4), _ROWS, -1, -2, 4)(
        lambda h, i: F.multilabel_margin_loss(h, i[:, None].expand(3, 4))
    ),
    "max_unpool1d": _on((3, 2), torch.tensor([0, 3]), *_OF_4)(
        lambda h, i: F.max_unpool1d(h[None], i.expand(1, 3, 2).contiguous(), 2)
    ),
}


class Indexing(torch.nn.Module):
    """Every use, with indices of its own."""

    def __init__(self, uses: Mapping[str, Use] = USES) -> None:
        super().__init__()
        self.uses = dict(uses)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, tensors: dict[str, Any], indices: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The result of each use, by name."""
        return {n: use.call(tensors[n] * self.scale, indices[n]) for n, use in self.uses.items()}


def inputs(**others: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Arguments of :class:`Indexing`; ``others`` are numbers for the last place of some uses' indices."""
    generator = torch.Generator().manual_seed(3)
    tensors = {n: torch.randn(use.shape, generator=generator) for n, use in USES.items()}
    return tensors, {n: use.with_last(others[n]) if n in others else use.index for n, use in USES.items()}


def outcome(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a call, or the class and the text of the exception that it raises."""
    try:
        return call(*arguments)
    except Exception as error:
        return type(error), str(error)
