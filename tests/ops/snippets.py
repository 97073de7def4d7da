"""Small uses of the operators that PyTorch models consist of.

Each entry maps a name to a function of ``h``, a float tensor of shape (3, 6, 8) that requires a
gradient and holds positive and negative numbers, some of them zero and some of them equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Snippet = Callable[[torch.Tensor], Any]

# torch 2.11 lacks a derivative of aminmax, and its torch.export cannot trace quantile, which reads a value.
TORCH_2_11 = torch.__version__.startswith("2.11.")


def _positive(h: torch.Tensor) -> torch.Tensor:
    return h * h + 0.5


def _labels(n: int, classes: int) -> torch.Tensor:
    return torch.arange(n) % classes


def _image(h: torch.Tensor) -> torch.Tensor:
    return h.reshape(2, 2, 6, 6)


def _square(h: torch.Tensor) -> torch.Tensor:
    """Well conditioned symmetric matrices."""
    a = h[:, :, :6]
    return a @ a.transpose(1, 2) / 8 + torch.eye(6)


def _weight(*shape: int) -> torch.Tensor:
    n = math.prod(shape)
    return torch.linspace(-1, 1, n).reshape(shape)


ARITHMETIC: dict[str, Snippet] = {
    "add": lambda h: h + h.flip(0).detach() + 1,
    "add, alpha": lambda h: torch.add(h, h * 2, alpha=0.5),
    "add, broadcast": lambda h: h + h[:, :1] + h[0, 0],
    "add to itself": lambda h: h + h,
    "sub": lambda h: h - h[:1] - 2,
    "rsub": lambda h: 1 - h,
    "mul": lambda h: h * h[:, :, :1] * 3,
    "mul by itself": lambda h: h * h,
    "mul by a bool": lambda h: h * (h > 0),
    "mul by an int": lambda h: h * torch.arange(8),
    "div": lambda h: h / _positive(h[:, :1]),
    "div by a number": lambda h: h / 3,
    "number divided": lambda h: 2 / _positive(h),
    "div, floor": lambda h: torch.div(h, 0.3, rounding_mode="floor") + h,
    "div, trunc": lambda h: torch.div(h, 0.3, rounding_mode="trunc") + h,
    "floor_divide": lambda h: torch.floor_divide(h.detach(), 0.3) + h,
    "remainder": lambda h: torch.remainder(h, 0.7),
    "fmod": lambda h: torch.fmod(h, 0.7),
    "neg": lambda h: -h,
    "abs": lambda h: h.abs(),
    "sign": lambda h: h.sign() * h,
    "sign alone": lambda h: h.sign(),
    "sgn": lambda h: h.sgn(),
    "sgn, beside others": lambda h: h.sgn() * h,
    "angle": lambda h: h.angle(),
    "angle, beside others": lambda h: h.angle() + h,
    "nextafter": lambda h: torch.nextafter(h, h + 1),
    "fill": lambda h: torch.fill(h, 0.5),
    "zero in place": lambda h: h.clone().zero_(),
    "bessel_j0": lambda h: torch.special.bessel_j0(h),
    "bessel_j0, beside others": lambda h: torch.special.bessel_j0(h) * h,
    "reciprocal": lambda h: torch.reciprocal(_positive(h)),
    "square": lambda h: h.square(),
    "sqrt": lambda h: _positive(h).sqrt(),
    "rsqrt": lambda h: _positive(h).rsqrt(),
    "pow 0": lambda h: h**0 + h,
    "pow 1": lambda h: h**1,
    "pow 2": lambda h: h**2,
    "pow 3": lambda h: h**3,
    "pow -1": lambda h: _positive(h) ** -1,
    "pow 0.5": lambda h: _positive(h) ** 0.5,
    "pow 1.7": lambda h: _positive(h) ** 1.7,
    "pow, tensor exponent": lambda h: _positive(h) ** h,
    "pow, constant tensor exponent": lambda h: _positive(h) ** torch.arange(8.0),
    "pow, number base": lambda h: 2.0**h,
    "float_power": lambda h: torch.float_power(_positive(h), 2).float(),
    "exp": lambda h: h.exp(),
    "exp2": lambda h: h.exp2(),
    "expm1": lambda h: h.expm1(),
    "log": lambda h: _positive(h).log(),
    "log2": lambda h: _positive(h).log2(),
    "log10": lambda h: _positive(h).log10(),
    "log1p": lambda h: _positive(h).log1p(),
    "logaddexp": lambda h: torch.logaddexp(h, h.flip(0)),
    "xlogy": lambda h: torch.xlogy(h, _positive(h)),
    "lerp": lambda h: torch.lerp(h, h * 2, 0.3),
    "addcmul": lambda h: torch.addcmul(h, h, h, value=0.5),
    "addcdiv": lambda h: torch.addcdiv(h, h, _positive(h), value=0.5),
    "hypot": lambda h: torch.hypot(h + 3, h),
    "copysign": lambda h: torch.copysign(h, h.flip(0)),
    "nan_to_num": lambda h: torch.nan_to_num(h / h.abs().detach(), nan=0.5),
    "clamp": lambda h: h.clamp(-0.5, 0.8),
    "clamp, at the bound": lambda h: h.clamp(min=0),
    "clamp, one bound": lambda h: h.clamp(max=0.3),
    "clamp, tensor bounds": lambda h: torch.clamp(h, h.detach() - 1, torch.tensor(0.5)),
    "maximum": lambda h: torch.maximum(h, h.flip(0)),
    "minimum": lambda h: torch.minimum(h, torch.zeros(())),
    "fmax": lambda h: torch.fmax(h, h.flip(0)),
    "floor": lambda h: h.floor() + h,
    "ceil": lambda h: h.ceil() + h,
    "round": lambda h: h.round() * h,
    "round, decimals": lambda h: h.round(decimals=1) + h,
    "floor alone": lambda h: h.floor(),
    "ceil alone": lambda h: h.ceil(),
    "round alone": lambda h: h.round(),
    "trunc": lambda h: h.trunc() + h,
    "trunc alone": lambda h: h.trunc(),
    "frac": lambda h: h.frac(),
    "straight-through rounding": lambda h: h + (h.round() - h).detach(),
    "heaviside": lambda h: torch.heaviside(h.detach(), torch.tensor(0.5)) * h,
}

TRIGONOMETRY: dict[str, Snippet] = {
    "sin": lambda h: h.sin(),
    "cos": lambda h: h.cos(),
    "tan": lambda h: (h / 3).tan(),
    "asin": lambda h: (h / 4).asin(),
    "acos": lambda h: (h / 4).acos(),
    "atan": lambda h: h.atan(),
    "atan2": lambda h: torch.atan2(h, _positive(h)),
    "sinh": lambda h: h.sinh(),
    "cosh": lambda h: h.cosh(),
    "asinh": lambda h: h.asinh(),
    "acosh": lambda h: (_positive(h) + 1).acosh(),
    "atanh": lambda h: (h / 4).atanh(),
    "sinc": lambda h: (h + 4).sinc(),
    "erf": lambda h: h.erf(),
    "erfc": lambda h: h.erfc(),
    "erfinv": lambda h: (h / 4).erfinv(),
    "lgamma": lambda h: _positive(h).lgamma(),
    "digamma": lambda h: _positive(h).digamma(),
    "logit": lambda h: torch.logit(h.sigmoid()),
    "i0": lambda h: torch.i0(h),
    "deg2rad": lambda h: torch.deg2rad(h),
}

ACTIVATIONS: dict[str, Snippet] = {
    "relu": lambda h: F.relu(h),
    "relu, in place": lambda h: F.relu(h * 2, inplace=True),
    "relu6": lambda h: F.relu6(h * 4),
    "leaky_relu": lambda h: F.leaky_relu(h),
    "leaky_relu, negative slope": lambda h: F.leaky_relu(h, -0.2),
    "prelu, one weight": lambda h: F.prelu(h, h[0, 0, :1]),
    "prelu, per channel": lambda h: F.prelu(h, h[0, :, 0]),
    "rrelu, eval": lambda h: F.rrelu(h, training=False),
    "rrelu, training": lambda h: F.rrelu(h, training=True),
    "elu": lambda h: F.elu(h),
    "elu of large numbers": lambda h: F.elu(h * 200),
    "celu": lambda h: F.celu(h, alpha=0.7),
    "selu": lambda h: F.selu(h),
    "gelu": lambda h: F.gelu(h),
    "gelu, tanh": lambda h: F.gelu(h, approximate="tanh"),
    "gelu written out": lambda h: 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))),
    "silu": lambda h: F.silu(h),
    "mish": lambda h: F.mish(h),
    "softplus": lambda h: F.softplus(h),
    "softplus, beta": lambda h: F.softplus(h, beta=3, threshold=2),
    "softplus of large numbers": lambda h: F.softplus(h * 200),
    "logsigmoid": lambda h: F.logsigmoid(h),
    "logsigmoid of large numbers": lambda h: F.logsigmoid(h * 200),
    "sigmoid": lambda h: torch.sigmoid(h),
    "tanh": lambda h: torch.tanh(h),
    "hardsigmoid": lambda h: F.hardsigmoid(h * 3),
    "hardswish": lambda h: F.hardswish(h * 3),
    "hardtanh": lambda h: F.hardtanh(h),
    "hardshrink": lambda h: F.hardshrink(h),
    "softshrink": lambda h: F.softshrink(h),
    "tanhshrink": lambda h: F.tanhshrink(h),
    "fake_quantize": lambda h: torch.fake_quantize_per_tensor_affine(h, 0.1, 3, -8, 7),
    "fake_quantize, bytes": lambda h: torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -128, 127),
    "fake_quantize, channels": lambda h: torch.fake_quantize_per_channel_affine(
        h, torch.full((h.shape[1],), 0.1), torch.zeros(h.shape[1], dtype=torch.int32), 1, -128, 127
    ),
    "softsign": lambda h: F.softsign(h),
    "threshold": lambda h: F.threshold(h, 0.2, -1.0),
    "glu": lambda h: F.glu(h),
    "softmax": lambda h: F.softmax(h, -1),
    "softmax, first axis": lambda h: F.softmax(h, 0),
    "softmax, dtype": lambda h: F.softmax(h, -1, dtype=torch.float64).float(),
    "softmin": lambda h: F.softmin(h, 1),
    "log_softmax": lambda h: F.log_softmax(h, 1),
    "gumbel_softmax": lambda h: F.gumbel_softmax(h, hard=True),
}

REDUCTIONS: dict[str, Snippet] = {
    "sum": lambda h: h.sum(),
    "sum, axes": lambda h: h.sum((0, 2)),
    "sum, keepdim": lambda h: h.sum(1, keepdim=True) * h,
    "sum of a bool": lambda h: (h > 0).sum() * h,
    "mean": lambda h: h.mean(),
    "mean, axes": lambda h: h.mean((1, 2)),
    "mean, keepdim": lambda h: h - h.mean(-1, keepdim=True),
    "nansum": lambda h: h.nansum(-1),
    "var": lambda h: h.var(-1),
    "var, biased": lambda h: h.var((0, 1), unbiased=False),
    "var_mean": lambda h: torch.var_mean(h, 2),
    "std": lambda h: h.std(-1),
    "std of everything": lambda h: h.std(),
    "std of zeros": lambda h: (h * 0).std(-1) + (h * 0).std(),
    "std_mean": lambda h: torch.std_mean(h, 1, keepdim=True),
    "norm": lambda h: h.norm(),
    "norm, axis": lambda h: h.norm(dim=-1),
    "norm 1": lambda h: h.norm(p=1, dim=1),
    "norm 3": lambda h: (h + 4).norm(p=3, dim=-1),
    "norm inf": lambda h: h.norm(p=math.inf, dim=-1),
    "norm of zeros": lambda h: (h * 0).norm(dim=-1),
    "vector_norm": lambda h: torch.linalg.vector_norm(h, dim=(1, 2)),
    "normalize": lambda h: F.normalize(h, dim=-1),
    "max of everything": lambda h: h.max(),
    "max, axis": lambda h: h.max(-1).values,
    "max, indices": lambda h: (h * 0 + h.max(1, keepdim=True).indices) * h,
    "min of everything": lambda h: h.min(),
    "min, axis": lambda h: h.min(1).values,
    "amax": lambda h: h.amax((0, 1)),
    "amin": lambda h: h.amin(-1, keepdim=True),
    "aminmax": lambda h: torch.aminmax(h, dim=-1),
    "argmax": lambda h: h * h.argmax(-1, keepdim=True),
    "prod": lambda h: h.prod(-1),
    "prod of everything": lambda h: h[:, :2, :2].prod(),
    "logsumexp": lambda h: h.logsumexp(-1),
    "logsumexp, axes": lambda h: h.logsumexp((0, 1), keepdim=True),
    "cumsum": lambda h: h.cumsum(1),
    "cumprod": lambda h: h.cumprod(-1),
    "cummax": lambda h: h.cummax(-1).values,
    "logcumsumexp": lambda h: h.logcumsumexp(1),
    "median": lambda h: h.median(-1).values,
    "quantile": lambda h: h.quantile(0.3, -1),
    "kthvalue": lambda h: h.kthvalue(3, -1).values,
    "mode": lambda h: h.mode(-1).values,
    "topk": lambda h: h.topk(3).values,
    "topk, smallest": lambda h: h.topk(2, 1, largest=False).values,
    "sort": lambda h: h.sort(-1).values,
    "sort, descending": lambda h: h.sort(1, descending=True).values,
    "argsort": lambda h: h.gather(-1, h.argsort(-1)),
    "any, all": lambda h: h * (h > 0).any(-1, keepdim=True) * (h < 9).all(),
    "count_nonzero": lambda h: h * torch.count_nonzero(h, 1).unsqueeze(1),
    "diff": lambda h: h.diff(dim=-1),
    "trace": lambda h: h[0].trace(),
    "renorm": lambda h: torch.renorm(h, 2, 0, 1.0),
    "cov": lambda h: torch.cov(h[0]),
    "bincount": lambda h: torch.bincount(_labels(9, 4), minlength=8) * h,
    "histc": lambda h: torch.histc(h.detach(), 8, -2, 2) * h,
}

MATRICES: dict[str, Snippet] = {
    "matmul": lambda h: h @ h.transpose(1, 2),
    "matmul by itself": lambda h: h[:, :, :6] @ h[:, :, :6],
    "matmul, 2-D weight": lambda h: h @ _weight(8, 5),
    "matmul, vector": lambda h: h @ h[0, 0],
    "matmul, vector first": lambda h: h[0, :, 0] @ h,
    "matmul, broadcast": lambda h: h.unsqueeze(1) @ h.transpose(1, 2).unsqueeze(0),
    "mm": lambda h: h[0].mm(h[1].t()),
    "bmm": lambda h: torch.bmm(h, h.transpose(1, 2)),
    "mv": lambda h: h[0].mv(h[1, 0]),
    "dot": lambda h: h[0, 0].dot(h[1, 1]),
    "outer": lambda h: torch.outer(h[0, 0], h[1, 0]),
    "addmm": lambda h: torch.addmm(h[0, :, :6], h[0], h[1].t(), beta=0.5, alpha=2),
    "addmv": lambda h: torch.addmv(h[0, :, 0], h[0], h[1, 0]),
    "addbmm": lambda h: torch.addbmm(h[0, :, :6], h, h.transpose(1, 2)),
    "baddbmm": lambda h: torch.baddbmm(h[:, :, :6], h, h.transpose(1, 2), beta=0.5),
    "linear": lambda h: F.linear(h, h[0], h[1, :, 0]),
    "linear, vector": lambda h: F.linear(h[0, 0], h[1]),
    "bilinear": lambda h: F.bilinear(h[0], h[1], _weight(4, 8, 8)),
    "einsum": lambda h: torch.einsum("bij,bkj->bik", h, h),
    "einsum, sum": lambda h: torch.einsum("bij,j->i", h, h[0, 0]),
    "einsum, diagonal": lambda h: torch.einsum("bii->bi", h[:, :, :6]),
    "einsum, three": lambda h: torch.einsum("bij,bkj,bk->bi", h, h, h[:, :, 0]),
    "tensordot": lambda h: torch.tensordot(h, h, dims=([1, 2], [1, 2])),
    "kron": lambda h: torch.kron(h[0], h[1, :2, :2]),
    "cross": lambda h: torch.linalg.cross(h[:, :, :3], h[:, :, 3:6]),
    "cdist": lambda h: torch.cdist(h, h.flip(0) + 1),
    "pairwise_distance": lambda h: F.pairwise_distance(h[0], h[1]),
    "cosine_similarity": lambda h: F.cosine_similarity(h, h.flip(1) + 1, dim=-1),
    "inverse": lambda h: torch.linalg.inv(_square(h)),
    "det": lambda h: torch.linalg.det(_square(h)),
    "slogdet": lambda h: torch.linalg.slogdet(_square(h))[1],
    "cholesky": lambda h: torch.linalg.cholesky(_square(h)),
    "solve": lambda h: torch.linalg.solve(_square(h), h),
    "eigvalsh": lambda h: torch.linalg.eigvalsh(_square(h / 4) + torch.diag(torch.arange(6.0))),
    "svdvals": lambda h: torch.linalg.svdvals(h + torch.eye(6, 8)),
    "qr": lambda h: torch.linalg.qr(_square(h))[1].abs(),
    "matrix_exp": lambda h: torch.matrix_exp(h[:, :, :6] / 4),
    "matrix_power": lambda h: torch.linalg.matrix_power(h[:, :, :6], 3),
}

SHAPES: dict[str, Snippet] = {
    "view": lambda h: h.view(3, -1),
    "view, split axis": lambda h: h.view(3, 6, 2, 4).transpose(1, 2),
    "reshape": lambda h: h.transpose(0, 1).reshape(-1, 4),
    "flatten": lambda h: h.flatten(1),
    "unflatten": lambda h: h.unflatten(2, (2, 4)).sum(2),
    "squeeze": lambda h: h[:, :1].squeeze(1),
    "squeeze of everything": lambda h: h[:1, :1].squeeze(),
    "unsqueeze": lambda h: h.unsqueeze(1) * 2,
    "transpose": lambda h: h.transpose(0, 2),
    "permute": lambda h: h.permute(2, 0, 1),
    "movedim": lambda h: h.movedim(0, -1),
    "mT": lambda h: h.mT * 2,
    "expand": lambda h: h[:, :1].expand(3, 4, 8) * _weight(4, 8),
    "expand_as": lambda h: h[:1].expand_as(h) * h,
    "broadcast_to": lambda h: torch.broadcast_to(h[0, 0], (2, 8)) * _weight(2, 8),
    "repeat": lambda h: h.repeat(2, 1, 3),
    "repeat_interleave": lambda h: h.repeat_interleave(2, 1),
    "tile": lambda h: torch.tile(h, (1, 2)),
    "cat": lambda h: torch.cat([h, h[:, :2] * 2], 1),
    "cat of itself": lambda h: torch.cat([h, h], -1),
    "stack": lambda h: torch.stack([h, h * 2], 1),
    "hstack": lambda h: torch.hstack([h, h]),
    "chunk": lambda h: h.chunk(2, -1)[0] * h.chunk(2, -1)[1],
    "chunk, one part used": lambda h: h.chunk(2, -1)[0] * 2,
    "chunk, one part detached": lambda h: h.chunk(2, -1)[0] * h.chunk(2, -1)[1].detach(),
    "chunk, uneven": lambda h: h.chunk(3, -1)[2] * 2,
    "split": lambda h: sum(part.sum() * i for i, part in enumerate(h.split(3, 2))),
    "split, sizes": lambda h: h.split([3, 5], -1)[1] * 2,
    "tensor_split": lambda h: h.tensor_split(3, -1)[1] * 2,
    "unbind": lambda h: h.unbind(1)[0] * h.unbind(1)[3],
    "select": lambda h: h[1] * h[-1],
    "slice": lambda h: h[:, 1:5:2] * h[:, -2:],
    "slice, to the end": lambda h: h[..., 3:],
    "narrow": lambda h: h.narrow(1, 2, 3),
    "flip": lambda h: h.flip(-1) * h,
    "flip, two axes": lambda h: h.flip(0, 2) * h,
    "roll": lambda h: h.roll(2, -1) * h,
    "roll, two axes": lambda h: h.roll((1, 2), (0, 1)) * h,
    "rot90": lambda h: torch.rot90(h, 1, (1, 2)),
    "diagonal": lambda h: h.diagonal(dim1=1, dim2=2),
    "diag": lambda h: torch.diag(h[0, 0]) * 2,
    "diag_embed": lambda h: torch.diag_embed(h),
    "tril": lambda h: h.tril(),
    "triu": lambda h: h.triu(1),
    "unfold": lambda h: h.unfold(1, 3, 2),
    "pixel_shuffle": lambda h: F.pixel_shuffle(h.reshape(1, 4, 6, 6), 2),
    "pixel_unshuffle": lambda h: F.pixel_unshuffle(h.reshape(1, 1, 12, 12), 2),
    "channel_shuffle": lambda h: F.channel_shuffle(h.reshape(1, 4, 6, 6), 2),
    "pad": lambda h: F.pad(h, (1, 2, 0, 1), value=0.5),
    "pad, negative": lambda h: F.pad(h, (-1, 2)),
    "pad, reflect": lambda h: F.pad(h, (2, 1), mode="reflect"),
    "pad, replicate": lambda h: F.pad(h, (2, 1), mode="replicate"),
    "pad, circular": lambda h: F.pad(h, (2, 1), mode="circular"),
    "meshgrid": lambda h: torch.meshgrid(h[0, 0], h[0, :, 0], indexing="ij")[0] * 2,
    "contiguous": lambda h: h.transpose(0, 1).contiguous() * 2,
    "clone": lambda h: h.clone() * 2,
    "double": lambda h: (h.double() * 2).float(),
    "to int and back": lambda h: h * h.long().float(),
    "type_as": lambda h: torch.ones(8, dtype=torch.int64).type_as(h) * h,
    "zeros_like": lambda h: torch.zeros_like(h) + torch.ones_like(h) * h + torch.full_like(h, 2),
    "new_zeros": lambda h: torch.cat([h, h.new_zeros(3, 1, 8), h.new_full((3, 1, 8), 2.0)], 1),
    "arange": lambda h: torch.arange(8, dtype=torch.float32) * h + torch.linspace(0, 1, 8),
    "one_hot": lambda h: F.one_hot(_labels(6, 8), 8) * h,
    "fill in place": lambda h: h * torch.empty(8).fill_(2.0),
}

INDEXING: dict[str, Snippet] = {
    "index, list": lambda h: h[:, [0, 3, 3]],
    "index, two tensors": lambda h: h[torch.tensor([0, 2]), torch.tensor([1, -1])],
    "index, one step apart": lambda h: h[:, torch.tensor([0, 2]), :, None] * 2,
    "index, separated": lambda h: h[torch.tensor([0, 2]), :, torch.tensor([1, 3])],
    "index, negative": lambda h: h[:, torch.tensor([-1, -2])],
    "index, bool": lambda h: h * torch.where((h > 0).detach(), 1.0, 2.0),
    "index, constant mask": lambda h: h[torch.tensor([True, False, True])],
    "index_select": lambda h: h.index_select(1, torch.tensor([0, 2, 2])),
    "gather": lambda h: h.gather(2, torch.tensor([[[0, 7, 7]]]).expand(3, 6, 3)),
    "take_along_dim": lambda h: torch.take_along_dim(h, h.argsort(1), 1),
    "take": lambda h: h.take(torch.tensor([0, 5, 5])),
    "where": lambda h: torch.where(h > 0, h, -2 * h),
    "where, broadcast": lambda h: torch.where(h > 0, h[:, :1], h[0, 0]),
    "where, number": lambda h: torch.where(h > 0, h, 0.5),
    "where, learned number": lambda h: torch.where(h > 0, h, h[0, 0, 0]),
    "masked_fill": lambda h: h.masked_fill(h > 1, 0.5),
    "masked_fill, -inf": lambda h: F.softmax(h.masked_fill(h.detach() > 1, -math.inf), -1),
    "masked_scatter": lambda h: h.masked_scatter(h.detach() > 0, h * 2),
    "scatter": lambda h: torch.zeros(3, 6, 9).scatter(2, torch.arange(8).expand(3, 6, 8), h),
    "scatter, number": lambda h: h.scatter(1, torch.zeros(3, 1, 8, dtype=torch.int64), 0.5),
    "scatter_add": lambda h: h.scatter_add(1, torch.zeros(3, 6, 8, dtype=torch.int64), h * 2),
    "scatter_reduce": lambda h: h.scatter_reduce(1, torch.zeros(3, 6, 8, dtype=torch.int64), h, "amax"),
    "index_add": lambda h: h.index_add(1, torch.tensor([0, 0, 2]), h[:, :3] * 2),
    "index_copy": lambda h: h.index_copy(1, torch.tensor([0, 2]), h[:, :2] * 2),
    "index_fill": lambda h: h.index_fill(1, torch.tensor([0, 2]), 0.5),
    "index_put": lambda h: h.clone().index_put((torch.tensor([0, 1]),), h[1:] * 2),
    "index_put, accumulate": lambda h: h.index_put((torch.tensor([0, 0]),), h[1:] * 2, accumulate=True),
    "assign a slice": lambda h: _assign(h, lambda t: t.__setitem__((slice(None), slice(2, 4)), 0.5)),
    "assign a row": lambda h: _assign(h, lambda t: t.__setitem__(0, h[1] * 2)),
    "assign by mask": lambda h: _assign(h, lambda t: t.__setitem__(h.detach() > 1, 0.5)),
    "add in place to a slice": lambda h: _assign(h, lambda t: t[:, 1:3].add_(h[:, 3:5])),
    "searchsorted": lambda h: h * torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0]), h.detach()),
    "embedding": lambda h: F.embedding(torch.tensor([[0, 1], [5, 1]]), h[0]),
    "embedding, padding": lambda h: F.embedding(torch.tensor([[0, 1], [5, 1]]), h[0], padding_idx=1),
    "embedding, by frequency": lambda h: F.embedding(torch.tensor([0, 1, 1]), h[0], scale_grad_by_freq=True),
    "embedding_bag": lambda h: F.embedding_bag(torch.tensor([[0, 1], [5, 1]]), h[0], mode="mean"),
}


def _assign(h: torch.Tensor, write: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    t = h.clone()
    write(t)
    return t


NORMALIZATIONS: dict[str, Snippet] = {
    "layer_norm": lambda h: F.layer_norm(h, (8,), h[0, 0], h[1, 0]),
    "layer_norm, no weights": lambda h: F.layer_norm(h, (8,)),
    "layer_norm, no bias": lambda h: F.layer_norm(h, (8,), h[0, 0]),
    "layer_norm, two axes": lambda h: F.layer_norm(h, (6, 8), h[0], h[1]),
    "rms_norm": lambda h: F.rms_norm(h, (8,), h[0, 0]),
    "rms_norm, two axes": lambda h: F.rms_norm(h, (6, 8), eps=1e-3),
    "group_norm": lambda h: F.group_norm(h, 2, h[0, :, 0], h[1, :, 0]),
    "group_norm of vectors": lambda h: F.group_norm(h[0], 2),
    "instance_norm": lambda h: F.instance_norm(h, weight=h[0, :, 0], bias=h[1, :, 0]),
    "batch_norm, training": lambda h: F.batch_norm(h, None, None, h[0, :, 0], h[1, :, 0], training=True),
    "batch_norm of images": lambda h: F.batch_norm(_image(h), None, None, training=True),
    "batch_norm, eval": lambda h: F.batch_norm(h, torch.zeros(6), torch.ones(6), h[0, :, 0], h[1, :, 0]),
    "local_response_norm": lambda h: F.local_response_norm(_image(h), 2),
    "weight_norm": lambda h: torch._weight_norm(h[0], h[0].norm(dim=1, keepdim=True).detach(), 0),
}

CONVOLUTIONS: dict[str, Snippet] = {
    "conv1d": lambda h: F.conv1d(h, _kernel(h, 4, 6, 3)),
    "conv1d, same": lambda h: F.conv1d(h, _kernel(h, 4, 6, 3), padding="same"),
    "conv1d, one item": lambda h: F.conv1d(h[0], _kernel(h, 4, 6, 3)),
    "conv2d": lambda h: F.conv2d(_image(h), _kernel(h, 3, 2, 3, 3), h[0, 0, :3]),
    "conv2d, stride": lambda h: F.conv2d(_image(h), _kernel(h, 3, 2, 3, 3), stride=2, padding=1),
    "conv2d, dilation": lambda h: F.conv2d(_image(h), _kernel(h, 3, 2, 2, 2), dilation=2, padding=(1, 2)),
    "conv2d, groups": lambda h: F.conv2d(_image(h), _kernel(h, 4, 1, 3, 3), groups=2),
    "conv2d, same and dilated": lambda h: F.conv2d(
        _image(h), _kernel(h, 3, 2, 2, 2), padding="same", dilation=2
    ),
    "conv3d": lambda h: F.conv3d(h.reshape(1, 1, 3, 6, 8), _kernel(h, 2, 1, 2, 2, 2), padding=1),
    "conv_transpose1d": lambda h: F.conv_transpose1d(h, _kernel(h, 6, 2, 3), stride=2),
    "conv_transpose2d": lambda h: F.conv_transpose2d(
        _image(h), _kernel(h, 2, 3, 2, 2), stride=2, output_padding=1
    ),
    "im2col": lambda h: F.unfold(_image(h), 2),
    "col2im": lambda h: F.fold(h.reshape(2, 8, 9), (4, 4), 2),
    "max_pool1d": lambda h: F.max_pool1d(h, 2),
    "max_pool2d": lambda h: F.max_pool2d(_image(h), 3, 2, 1),
    "max_pool2d, ceil": lambda h: F.max_pool2d(_image(h), 4, 3, ceil_mode=True),
    "max_pool2d, dilation": lambda h: F.max_pool2d(_image(h), 2, dilation=2),
    "max_pool2d, indices": lambda h: F.max_pool2d(_image(h), 2, return_indices=True)[0],
    "max_unpool2d": lambda h: F.max_unpool2d(*F.max_pool2d(_image(h), 2, return_indices=True), 2),
    "max_pool3d": lambda h: F.max_pool3d(h.reshape(1, 1, 3, 6, 8), (1, 2, 2)),
    "avg_pool1d": lambda h: F.avg_pool1d(h, 2),
    "avg_pool2d": lambda h: F.avg_pool2d(_image(h), 3, 2, 1),
    "avg_pool2d, pad not counted": lambda h: F.avg_pool2d(_image(h), 3, 2, 1, count_include_pad=False),
    "avg_pool2d, ceil": lambda h: F.avg_pool2d(_image(h), 4, 3, ceil_mode=True),
    "avg_pool2d, divisor": lambda h: F.avg_pool2d(_image(h), 2, divisor_override=3),
    "lp_pool2d": lambda h: F.lp_pool2d(_image(h) + 4, 2, 2),
    "adaptive_avg_pool1d": lambda h: F.adaptive_avg_pool1d(h, 4),
    "adaptive_avg_pool2d, 1": lambda h: F.adaptive_avg_pool2d(_image(h), 1),
    "adaptive_avg_pool2d, uneven": lambda h: F.adaptive_avg_pool2d(_image(h), 4),
    "adaptive_max_pool2d": lambda h: F.adaptive_max_pool2d(_image(h), 3),
    "fractional_max_pool2d": lambda h: F.fractional_max_pool2d(_image(h), 2, output_size=3),
    "interpolate, nearest": lambda h: F.interpolate(_image(h), scale_factor=2),
    "interpolate, nearest to a size": lambda h: F.interpolate(h, size=11),
    "interpolate, linear": lambda h: F.interpolate(h, scale_factor=2, mode="linear"),
    "interpolate, bilinear": lambda h: F.interpolate(_image(h), size=(9, 5), mode="bilinear"),
    "interpolate, corners": lambda h: F.interpolate(_image(h), size=9, mode="bilinear", align_corners=True),
    "interpolate, bicubic": lambda h: F.interpolate(_image(h), scale_factor=2, mode="bicubic"),
    "interpolate, area": lambda h: F.interpolate(_image(h), size=3, mode="area"),
    "interpolate, antialias": lambda h: F.interpolate(_image(h), size=4, mode="bilinear", antialias=True),
    "grid_sample": lambda h: F.grid_sample(_image(h), _weight(2, 3, 3, 2), align_corners=False),
    "affine_grid": lambda h: F.affine_grid(h[:2, :2, :3], [2, 1, 3, 3], align_corners=False),
}


def _kernel(h: torch.Tensor, *shape: int) -> torch.Tensor:
    """A kernel that requires a gradient too."""
    return h.flatten()[: math.prod(shape)].reshape(shape) * 0.5 + _weight(*shape)


LOSSES: dict[str, Snippet] = {
    "cross_entropy": lambda h: F.cross_entropy(h[0], _labels(6, 8)),
    "cross_entropy, none": lambda h: F.cross_entropy(h[0], _labels(6, 8), reduction="none"),
    "cross_entropy, sum": lambda h: F.cross_entropy(h[0], _labels(6, 8), reduction="sum"),
    "cross_entropy, weights": lambda h: F.cross_entropy(h[0], _labels(6, 8), torch.arange(1.0, 9)),
    "cross_entropy, ignored": lambda h: F.cross_entropy(h[0], _labels(6, 8) - 1, ignore_index=-1),
    "cross_entropy, images": lambda h: F.cross_entropy(h, torch.arange(24).reshape(3, 8) % 6),
    "cross_entropy, one item": lambda h: F.cross_entropy(h[0, 0], torch.tensor(3)),
    "cross_entropy, smoothed": lambda h: F.cross_entropy(h[0], _labels(6, 8), label_smoothing=0.1),
    "cross_entropy, smoothed and weighted": lambda h: F.cross_entropy(
        h[0], _labels(6, 8) - 1, torch.arange(1.0, 9), ignore_index=-1, label_smoothing=0.1
    ),
    "cross_entropy, probabilities": lambda h: F.cross_entropy(h[0], F.softmax(h[1].detach(), -1)),
    "cross_entropy, learned targets": lambda h: F.cross_entropy(
        h[0], F.softmax(h[1], -1), label_smoothing=0.1
    ),
    "nll_loss": lambda h: F.nll_loss(F.log_softmax(h[0], -1), _labels(6, 8)),
    "nll_loss, weights": lambda h: F.nll_loss(h[0], _labels(6, 8) - 1, torch.arange(1.0, 9), ignore_index=-1),
    "nll_loss, images": lambda h: F.nll_loss(
        h.unsqueeze(-1), torch.arange(24).reshape(3, 8, 1) % 6, reduction="sum"
    ),
    "mse_loss": lambda h: F.mse_loss(h, h.flip(0).detach()),
    "mse_loss, none": lambda h: F.mse_loss(h, torch.zeros_like(h), reduction="none"),
    "l1_loss": lambda h: F.l1_loss(h, torch.zeros_like(h)),
    "smooth_l1_loss": lambda h: F.smooth_l1_loss(h, torch.zeros_like(h), beta=0.7),
    "huber_loss": lambda h: F.huber_loss(h, torch.ones_like(h), delta=0.7),
    "binary_cross_entropy": lambda h: F.binary_cross_entropy(h.sigmoid(), (h > 0.3).float()),
    "binary_cross_entropy, sure": lambda h: F.binary_cross_entropy((h * 300).sigmoid(), (h > 1).float()),
    "binary_cross_entropy_with_logits": lambda h: F.binary_cross_entropy_with_logits(
        h * 30, (h > 0.3).float(), pos_weight=torch.arange(1.0, 9)
    ),
    "kl_div": lambda h: F.kl_div(
        F.log_softmax(h, -1), F.softmax(h.flip(0).detach(), -1), reduction="batchmean"
    ),
    "kl_div, log target": lambda h: F.kl_div(
        F.log_softmax(h, -1), F.log_softmax(h.flip(0), -1), log_target=True
    ),
    "poisson_nll_loss": lambda h: F.poisson_nll_loss(h, torch.ones_like(h)),
    "gaussian_nll_loss": lambda h: F.gaussian_nll_loss(h, torch.zeros_like(h), _positive(h)),
    "hinge_embedding_loss": lambda h: F.hinge_embedding_loss(h, torch.ones(8).sign()),
    "cosine_embedding_loss": lambda h: F.cosine_embedding_loss(
        h[0], h[1], torch.tensor([1, -1, 1, 1, -1, 1])
    ),
    "margin_ranking_loss": lambda h: F.margin_ranking_loss(h[0], h[1], torch.ones(6, 8), margin=0.3),
    "triplet_margin_loss": lambda h: F.triplet_margin_loss(h[0], h[1], h[2]),
    "soft_margin_loss": lambda h: F.soft_margin_loss(h, torch.ones_like(h)),
    "multi_margin_loss": lambda h: F.multi_margin_loss(h[0], _labels(6, 8)),
    "multilabel_margin_loss": lambda h: F.multilabel_margin_loss(h[0], torch.arange(48).reshape(6, 8) % 8),
    "multilabel_soft_margin_loss": lambda h: F.multilabel_soft_margin_loss(h[0], (h[1] > 0).float()),
    "ctc_loss": lambda h: F.ctc_loss(
        F.log_softmax(h, -1), torch.tensor([[1, 2]] * 6), torch.tensor([3] * 6), torch.tensor([2] * 6)
    ),
}

ATTENTION: dict[str, Snippet] = {
    "attention": lambda h: F.scaled_dot_product_attention(h, h * 2, h + 1),
    "attention, causal": lambda h: F.scaled_dot_product_attention(h, h * 2, h + 1, is_causal=True),
    "attention, bool mask": lambda h: F.scaled_dot_product_attention(h, h, h, torch.ones(6, 6).bool().triu()),
    "attention, row hidden": lambda h: F.scaled_dot_product_attention(
        h, h, h, (torch.arange(6) > 0).unsqueeze(1)
    ),
    "attention, float mask": lambda h: F.scaled_dot_product_attention(h, h, h, h[0, :, :6]),
    "attention, -inf mask": lambda h: F.scaled_dot_product_attention(
        h, h, h, torch.full((6, 6), -math.inf).triu(1)
    ),
    "attention, -inf row": lambda h: F.scaled_dot_product_attention(
        h, h, h, torch.where(torch.arange(6) > 0, 0.0, -math.inf).unsqueeze(1)
    ),
    "attention, scale": lambda h: F.scaled_dot_product_attention(h, h, h, scale=0.3),
    "attention, dropout": lambda h: F.scaled_dot_product_attention(h, h, h, dropout_p=0.3),
    "attention, grouped queries": lambda h: F.scaled_dot_product_attention(
        h.view(3, 6, 4, 2).transpose(1, 2), h[..., :4].view(3, 6, 2, 2).transpose(1, 2),
        h[..., 4:].view(3, 6, 2, 2).transpose(1, 2), enable_gqa=True,
    ),
    "multi_head_attention": lambda h: F.multi_head_attention_forward(
        h, h, h, 8, 2, _weight(24, 8), _weight(24), None, None, False, 0.1, _weight(8, 8), _weight(8)
    )[0],
}  # fmt: skip

RANDOM: dict[str, Snippet] = {
    "dropout": lambda h: F.dropout(h, 0.3),
    "dropout, in place": lambda h: F.dropout(h * 2, 0.3, inplace=True),
    "dropout of a transposed": lambda h: F.dropout(h.transpose(0, 2), 0.3) * 2,
    "dropout twice": lambda h: F.dropout(F.dropout(h, 0.3), 0.5),
    "dropout of everything": lambda h: F.dropout(h, 1.0) + h,
    "dropout, eval": lambda h: F.dropout(h, 0.3, training=False) * 2,
    "dropout1d": lambda h: F.dropout1d(h, 0.3),
    "dropout2d": lambda h: F.dropout2d(_image(h), 0.3),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.3, training=True),
    "feature_alpha_dropout": lambda h: F.feature_alpha_dropout(_image(h), 0.3, training=True),
    "rand": lambda h: h * torch.rand(6, 8) + torch.rand(()),
    "rand_like": lambda h: h * torch.rand_like(h),
    "randn": lambda h: h + torch.randn(3, 1, 8),
    "randn_like": lambda h: h + torch.randn_like(h[0]),
    "randint": lambda h: h * torch.randint(1, 9, (8,)) + torch.randint_like(h, 4),
    "randperm": lambda h: h[..., torch.randperm(8)],
    "bernoulli": lambda h: h * torch.bernoulli(h.detach().sigmoid()),
    "bernoulli, normal of what requires a gradient": lambda h: (
        torch.bernoulli(h.sigmoid()) + torch.normal(h, 1.0)
    ),
    "bernoulli in place": lambda h: h * torch.empty(8).bernoulli_(0.3),
    "normal": lambda h: h + torch.normal(0.0, 1.0, (8,)),
    "normal, tensors": lambda h: h + torch.normal(h.detach(), 1.0),
    "uniform in place": lambda h: h + torch.empty(6, 8).uniform_(-1, 1),
    "exponential in place": lambda h: h + torch.empty(6, 8).exponential_(),
    "multinomial": lambda h: h * torch.multinomial(torch.ones(4, 8), 8, replacement=True)[0],
    "poisson": lambda h: h + torch.poisson(torch.full((8,), 3.0)),
}

RECURRENT: dict[str, Snippet] = {
    "lstm cell": lambda h: torch.lstm_cell(h[0], (h[1], h[2]), _weight(32, 8), _weight(32, 8)),
    "gru cell": lambda h: torch.gru_cell(h[0], h[1], _weight(24, 8), _weight(24, 8)),
    "rnn cell": lambda h: torch.rnn_tanh_cell(h[0], h[1], _weight(8, 8), _weight(8, 8)),
    "lstm": lambda h: torch.lstm(
        h, (torch.zeros(1, 6, 4), torch.zeros(1, 6, 4)),
        (_weight(16, 8), _weight(16, 4), _weight(16), _weight(16)), True, 1, 0.0, True, False, False,
    ),
    "gru": lambda h: torch.gru(
        h, torch.zeros(1, 6, 4), (_weight(12, 8), _weight(12, 4), _weight(12), _weight(12)),
        True, 1, 0.0, True, False, False,
    ),
}  # fmt: skip

GRADIENTS: dict[str, Snippet] = {
    "detach": lambda h: h * h.detach(),
    "detach of a product": lambda h: (h * 2).detach() * h,
    "no_grad": lambda h: h * _without_grad(h),
    "no_grad, nested": lambda h: h * _without_grad(_without_grad(h) * h),
    "requires_grad_(False)": lambda h: h + torch.ones(8).requires_grad_(False),
    "kernel after kernel": lambda h: h.cumsum(1).cumprod(2).amax(0),
    "reached only through detach": lambda h: (h.detach() * 2, h),
    "unused": lambda h: (h * 2, h.exp())[0],
    "an input returned": lambda h: (h, h * 2),
    "an output twice": lambda h: (lambda y: (y, y))(h * 2),
    "integers returned": lambda h: (h * 2, h.argmax(-1), h > 0),
}

SCALARS: dict[str, Snippet] = {
    "sqrt of a scalar": lambda h: h * (h.square().mean() + 1).sqrt(),
    "rsqrt of a scalar": lambda h: h * (h.square().mean() + 1).rsqrt(),
    "erf of a scalar": lambda h: h * h.mean().erf(),
    "cos of a scalar": lambda h: h * h.mean().cos(),
    "sin of a scalar": lambda h: h * h.mean().sin(),
    "pow of a scalar": lambda h: h * (h.square().mean() + 1) ** 1.5,
    "exp of a scalar": lambda h: h * h.mean().exp(),
    "log of a scalar": lambda h: h * (h.square().mean() + 1).log(),
    "abs of a scalar": lambda h: h * h.mean().abs(),
    "tanh of a scalar": lambda h: h * h.mean().tanh(),
    "sigmoid of a scalar": lambda h: h * h.mean().sigmoid(),
    "gelu of a scalar": lambda h: h * F.gelu(h.mean()),
    "relu of a scalar": lambda h: h * h.mean().relu(),
    "clamp of a scalar": lambda h: h * h.mean().clamp(-0.1, 0.1),
    "where of scalars": lambda h: h * torch.where(h.sum() > 0, h.mean(), h.std()),
    "maximum of scalars": lambda h: h * torch.maximum(h.mean(), h.std()),
    "division of scalars": lambda h: h * (h.mean() / (h.std() + 1)),
    "norm, then divided": lambda h: h / (h.norm() + 1e-6),
    "stack of scalars": lambda h: torch.stack([h.mean(), h.std(), h.sum()]) * 2,
    "expand of a scalar": lambda h: h.mean().expand(3, 2) * _weight(3, 2),
    "unsqueeze of a scalar": lambda h: h[0] * h.mean().sqrt().unsqueeze(0),
    "softmax of a scalar": lambda h: h * h.mean().softmax(0),
    "layer_norm, then a scalar": lambda h: F.layer_norm(h, (8,)).std() * h,
}

COMPLEX: dict[str, Snippet] = {
    "fft": lambda h: torch.fft.rfft(h).abs(),
    "complex": lambda h: torch.view_as_real(torch.complex(h, h)),
    "stft": lambda h: torch.stft(h[0], 4, return_complex=True, window=torch.ones(4)).abs(),
}


@torch.no_grad()
def _without_grad(h: torch.Tensor) -> torch.Tensor:
    return h.exp() * 2


GROUPS: dict[str, dict[str, Snippet]] = {
    "Arithmetic": ARITHMETIC,
    "Trigonometry and special functions": TRIGONOMETRY,
    "Activations": ACTIVATIONS,
    "Reductions, sorting, scans": REDUCTIONS,
    "Matrices": MATRICES,
    "Shapes and types": SHAPES,
    "Indexing": INDEXING,
    "Normalization": NORMALIZATIONS,
    "Convolution, pooling, resizing": CONVOLUTIONS,
    "Losses": LOSSES,
    "Attention": ATTENTION,
    "Random numbers": RANDOM,
    "Recurrent networks": RECURRENT,
    "Gradients": GRADIENTS,
    "Scalars": SCALARS,
    "Complex numbers": COMPLEX,
}
