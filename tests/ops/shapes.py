"""Operators at the edge cases of kernels: groups, strides, dilation, odd sizes and no elements.

Each entry maps a name to a function of ``h``, as in :mod:`tests.ops.snippets`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from tests.ops.snippets import Snippet

# Sizes behind the batch and the channels: one to three dimensions, none of them a power of two.
_SPACES = {1: (17,), 2: (5, 7), 3: (3, 5, 3)}


def _grown(h: torch.Tensor, *shape: int) -> torch.Tensor:
    """The numbers of ``h``, repeated, in another shape."""
    count = int(torch.Size(shape).numel())
    return h.reshape(-1).repeat(count // h.numel() + 1)[:count].reshape(shape)


def _convolution(rank: int, groups: int, batch: int, **options: int) -> Snippet:
    convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[rank]

    def snippet(h: torch.Tensor) -> torch.Tensor:
        x = _grown(h, batch, 4, *_SPACES[rank])
        weight = _grown(h * 0.1, 8, 4 // groups, *[3] * rank)
        return convolve(x, weight, h[0, 0] * 0.1, groups=groups, **options)

    return snippet


def _convolutions() -> Iterator[tuple[str, Snippet]]:
    options = [{}, {"padding": 2}, {"stride": 2, "padding": 1}, {"padding": 2, "dilation": 2}]
    for rank, groups, batch, given in itertools.product((1, 2, 3), (1, 2, 4), (1, 3), options):
        text = "".join(f", {name} {value}" for name, value in given.items())
        yield f"conv{rank}d, groups {groups}, batch {batch}{text}", _convolution(rank, groups, batch, **given)


def _pools() -> Iterator[tuple[str, Snippet]]:
    kinds = {
        "max_pool": (F.max_pool1d, F.max_pool2d, F.max_pool3d),
        "avg_pool": (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    }
    for (kind, functions), rank, ceil in itertools.product(kinds.items(), (1, 2, 3), (False, True)):
        for size, stride, padding in ((3, 2, 1), (2, 3, 0), (3, 1, 1)):
            name = f"{kind}{rank}d, size {size}, stride {stride}, padding {padding}{', ceil' * ceil}"

            def snippet(h, call=functions[rank - 1], rank=rank, given=(size, stride, padding), ceil=ceil):
                return call(_grown(h, 2, 3, *_SPACES[rank]), *given, ceil_mode=ceil)

            yield name, snippet


def _odd(h: torch.Tensor) -> torch.Tensor:
    """Three matrices of 5 x 7."""
    return h[:, :5, :7]


SHAPES: dict[str, Snippet] = {
    **dict(_convolutions()),
    **dict(_pools()),
    "matmul of odd sizes": lambda h: _odd(h) @ _odd(h).transpose(1, 2),
    "matmul, one row": lambda h: _odd(h)[:, :1] @ _odd(h).transpose(1, 2),
    "matmul, one column": lambda h: _odd(h) @ _odd(h)[:, 0].unsqueeze(-1),
    "matmul of vectors": lambda h: _odd(h)[0, 0] @ _odd(h)[0, 1],
    "linear of odd sizes": lambda h: F.linear(_odd(h), h[0, :3, :7], h[0, 0, :3]),
    "addmm of odd sizes": lambda h: torch.addmm(h[0, 0, :5], _odd(h)[0], _odd(h)[1].t()),
    "softmax of odd sizes": lambda h: _odd(h).softmax(1) + _odd(h).softmax(0),
    "log_softmax of odd sizes": lambda h: _odd(h).log_softmax(1),
    "layer_norm of odd sizes": lambda h: F.layer_norm(_odd(h), (5, 7)),
    "gelu of odd sizes": lambda h: F.gelu(_odd(h)),
    "sum over each axis": lambda h: _odd(h).sum(0).sum() + _odd(h).sum((0, 2)).mean(),
    "broadcast from the middle": lambda h: _odd(h) * h[:, :5, :1] + h[:1, :1, :7],
    "cat of odd sizes": lambda h: torch.cat([_odd(h), h[:, :1, :7], h[:, :0, :7]], 1),
    "split unevenly": lambda h: torch.split(_odd(h), [1, 4], 1),
    "slices with steps": lambda h: h[::2, 1::3, ::5],
    "negative padding": lambda h: F.pad(_odd(h), (-1, 2, 3, -2)),
    "gather of odd sizes": lambda h: _odd(h).gather(2, torch.tensor([6, 0, 3]).expand(3, 5, 3)),
    "index_select at the ends": lambda h: _odd(h).index_select(1, torch.tensor([4, 0, 4])),
    "embedding at the ends": lambda h: F.embedding(torch.tensor([[0, 4], [4, 0]]), _odd(h)[0]),
    "cross_entropy at the ends": lambda h: F.cross_entropy(_odd(h)[0], torch.tensor([0, 6, 6, 0, 3])),
    "transpose of odd sizes": lambda h: _odd(h).permute(2, 0, 1) * 2,
    "no rows": lambda h: torch.cat([h[:0] * 2, h]),
    "sum of no rows": lambda h: h[:0].sum() + h.sum(),
    "linear of no rows": lambda h: F.linear(h[:0].reshape(0, 8), h[0]).sum() + h.sum(),
    "softmax of no rows": lambda h: h[:0].softmax(-1).sum() + h.sum(),
    "layer_norm of no rows": lambda h: F.layer_norm(h[:0], (8,)).sum() + h.sum(),
    "matmul over nothing": lambda h: h[:, :, :0] @ h[:, :0, :] + h[:, :, :8],
    "one element": lambda h: h[:1, :1, :1].softmax(-1) + F.layer_norm(h[:1, :1, :1], (1,)),
    "topk of all": lambda h: _odd(h).topk(7)[0],
    "tile": lambda h: _odd(h).repeat(2, 1, 3),
    "nearest": lambda h: F.interpolate(_odd(h).unsqueeze(0), scale_factor=2.0),
    "scatter of odd sizes": lambda h: h.scatter(2, torch.tensor([7, 0, 3]).expand(3, 6, 3), h[..., :3] * 2),
    "index_put at the ends": lambda h: h.index_put((torch.tensor([2, 0]), torch.tensor([5, 0])), h[0, 0] * 2),
    "tril and triu": lambda h: _odd(h).tril(-1) + _odd(h).triu(2),
    "where, broadcast": lambda h: torch.where(h[:, :1] > 0, _odd(h).sum(), h),
    "pow": lambda h: (h * h + 0.5)[:, :5, :7] ** 1.5,
    "dropout of odd sizes": lambda h: F.dropout(_odd(h), 0.3),
    "batch_norm of odd sizes": lambda h: F.batch_norm(_odd(h), None, None, training=True),
    "one_hot": lambda h: F.one_hot(torch.tensor([0, 6, 3]), 7) * _odd(h)[:, 0],
}  # fmt: skip
