"""Operators over tensors of every dtype, exported and run, compared with eager PyTorch.

Each entry maps a name to a function of two tensors of one dtype, of shape (3, 4); the second has no zero.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

import torch2ort

Binary = Callable[[torch.Tensor, torch.Tensor], Any]

DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float64,
)
# For an operator in half precision, which eager PyTorch computes in float32 and rounds once.
_TOLERANCES = {torch.float16: (4e-3, 1e-3), torch.bfloat16: (3e-2, 1e-2), torch.float64: (1e-9, 1e-12)}

# torch.export refuses these, though eager PyTorch does not.
_UNTRACEABLE_OF_BOOLS = frozenset({"shift left, number", "shift right, number"})

_I = torch.tensor([2, 0, 1])

ARITHMETIC: dict[str, Binary] = {
    "add": lambda x, y: x + y,
    "add, alpha": lambda x, y: torch.add(x, y, alpha=2),
    "add, number": lambda x, y: x + 3,
    "add, float": lambda x, y: x + 0.1,
    "mul, float": lambda x, y: x * 0.1,
    "sub": lambda x, y: x - y,
    "rsub": lambda x, y: 5 - x,
    "mul": lambda x, y: x * y,
    "mul, number": lambda x, y: x * 7,
    "div": lambda x, y: x / y,
    "div, number": lambda x, y: x / 3,
    "div, floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "div, trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "floor_divide": lambda x, y: x // y,
    "floor_divide, number": lambda x, y: x // 3,
    "remainder": lambda x, y: x % y,
    "remainder, number": lambda x, y: x % 3,
    "fmod": lambda x, y: torch.fmod(x, y),
    "fmod, number": lambda x, y: torch.fmod(x, -3),
    "neg": lambda x, y: -x,
    "abs": lambda x, y: x.abs(),
    "sign": lambda x, y: x.sign(),
    "square": lambda x, y: x.square(),
    "pow 2": lambda x, y: x**2,
    "pow 3": lambda x, y: x**3,
    "pow 0": lambda x, y: x**0,
    "pow, tensors": lambda x, y: torch.pow(x, y.abs() % 4),
    "pow of a number": lambda x, y: 2 ** (y.abs() % 4),
    "pow 0.5": lambda x, y: x.abs() ** 0.5,
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=2),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.25),
    "bitwise and": lambda x, y: x & y,
    "bitwise or": lambda x, y: x | y,
    "bitwise xor": lambda x, y: x ^ y,
    "bitwise not": lambda x, y: ~x,
    "bitwise and, number": lambda x, y: x & 5,
    "shift left": lambda x, y: x << (y.abs() % 4),
    "shift right": lambda x, y: x >> (y.abs() % 4),
    "shift right, number": lambda x, y: x >> 1,
    "shift left, number": lambda x, y: x << 1,
    "gcd": lambda x, y: torch.gcd(x, y),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "clamp": lambda x, y: x.clamp(1, 5),
    "clamp, min": lambda x, y: x.clamp(min=2),
    "clamp, tensors": lambda x, y: x.clamp(min=y),
    "relu": lambda x, y: F.relu(x),
    "relu6": lambda x, y: F.relu6(x),
    "hypot": lambda x, y: torch.hypot(x, y),
    "copysign": lambda x, y: torch.copysign(x, y),
    "heaviside": lambda x, y: torch.heaviside(x, y),
    "nan_to_num": lambda x, y: x.nan_to_num(),
}
COMPARISON: dict[str, Binary] = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "eq, number": lambda x, y: x == 1,
    "ne, number": lambda x, y: x != 1,
    "lt, number": lambda x, y: x < 2,
    "ge, number": lambda x, y: x >= 2,
    "gt, float": lambda x, y: x > 1.5,
    "equal to zero": lambda x, y: x.eq(0).sum(),
    "isclose": lambda x, y: torch.isclose(x, y),
    "isnan": lambda x, y: x.isnan(),
    "isinf": lambda x, y: x.isinf(),
    "isfinite": lambda x, y: x.isfinite(),
    "isin": lambda x, y: torch.isin(x, y[0]),
    "signbit": lambda x, y: x.signbit(),
    "logical and": lambda x, y: torch.logical_and(x, y),
    "logical or": lambda x, y: torch.logical_or(x, y),
    "logical xor": lambda x, y: torch.logical_xor(x, y),
    "logical not": lambda x, y: torch.logical_not(x),
    "where": lambda x, y: torch.where(x > y, x, y),
    "where, number": lambda x, y: torch.where(x > y, x, 1),
    "masked_fill": lambda x, y: x.masked_fill(y > 1, 1),
}
FLOATING: dict[str, Binary] = {
    "exp": lambda x, y: (x / 64).exp(),
    "exp of it": lambda x, y: x.abs().clamp(max=5).exp(),
    "expm1": lambda x, y: (x / 64).expm1(),
    "log": lambda x, y: x.abs().log(),
    "log1p": lambda x, y: x.abs().log1p(),
    "log2": lambda x, y: x.abs().log2(),
    "sin": lambda x, y: x.sin(),
    "cos": lambda x, y: x.cos(),
    "tan": lambda x, y: (x / 64).tan(),
    "atan": lambda x, y: x.atan(),
    "asin": lambda x, y: (x / 256).asin(),
    "sinh": lambda x, y: (x / 64).sinh(),
    "asinh": lambda x, y: x.asinh(),
    "atan2": lambda x, y: torch.atan2(x, y),
    "sqrt": lambda x, y: x.abs().sqrt(),
    "rsqrt": lambda x, y: y.abs().rsqrt(),
    "reciprocal": lambda x, y: y.reciprocal(),
    "sigmoid": lambda x, y: x.sigmoid(),
    "tanh": lambda x, y: x.tanh(),
    "erf": lambda x, y: x.erf(),
    "floor": lambda x, y: x.floor(),
    "ceil": lambda x, y: x.ceil(),
    "round": lambda x, y: x.round(),
    "trunc": lambda x, y: x.trunc(),
    "frac": lambda x, y: x.frac(),
    "gelu": lambda x, y: F.gelu(x),
    "gelu, tanh": lambda x, y: F.gelu(x, approximate="tanh"),
    "silu": lambda x, y: F.silu(x),
    "mish": lambda x, y: F.mish(x),
    "elu": lambda x, y: F.elu(x),
    "celu": lambda x, y: F.celu(x),
    "selu": lambda x, y: F.selu(x),
    "leaky_relu": lambda x, y: F.leaky_relu(x),
    "prelu": lambda x, y: F.prelu(x, y[0, :1]),
    "softplus": lambda x, y: F.softplus(x),
    "hardswish": lambda x, y: F.hardswish(x),
    "hardsigmoid": lambda x, y: F.hardsigmoid(x),
    "hardtanh": lambda x, y: F.hardtanh(x),
    "logsigmoid": lambda x, y: F.logsigmoid(x),
    "softmax": lambda x, y: x.softmax(-1),
    "log_softmax": lambda x, y: x.log_softmax(-1),
    "softmax to float": lambda x, y: x.softmax(-1, dtype=torch.float32),
    "logsumexp": lambda x, y: x.logsumexp(-1),
    "layer_norm": lambda x, y: F.layer_norm(x, (4,), y[0], y[1]),
    "rms_norm": lambda x, y: F.rms_norm(x, (4,), y[0]),
    "group_norm": lambda x, y: F.group_norm(x[None], 3, y[:, 0], y[:, 1]),
    "batch_norm": lambda x, y: F.batch_norm(x, y[0], y[1].abs(), y[2]),
    "normalize": lambda x, y: F.normalize(x, dim=-1),
    "glu": lambda x, y: F.glu(x),
    "mse_loss": lambda x, y: F.mse_loss(x / 16, y / 16),
    "cross_entropy": lambda x, y: F.cross_entropy(x, _I),
    "nll_loss": lambda x, y: F.nll_loss(x, _I),
    "bce_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
}
REDUCTION: dict[str, Binary] = {
    "sum": lambda x, y: x.sum(),
    "sum of rows": lambda x, y: x.sum(1, keepdim=True),
    "sum to its dtype": lambda x, y: x.sum(0, dtype=x.dtype),
    "mean": lambda x, y: x.mean(1),
    "prod": lambda x, y: (y % 3).prod(),
    "prod that wraps": lambda x, y: y.prod(0) if not y.is_floating_point() else (y % 3).prod(0),
    "prod of rows": lambda x, y: (y % 3).prod(1),
    "amax": lambda x, y: x.amax(1),
    "amin": lambda x, y: x.amin((0, 1)),
    "aminmax": lambda x, y: tuple(x.aminmax(dim=1)),
    "max": lambda x, y: x.max(),
    "max of rows": lambda x, y: tuple(x.max(1)),
    "min of rows": lambda x, y: tuple(x.min(1)),
    "argmax": lambda x, y: x.argmax(1),
    "argmin": lambda x, y: x.argmin(),
    "any": lambda x, y: x.any(),
    "any of rows": lambda x, y: x.any(1),
    "all": lambda x, y: x.all(),
    "all of rows": lambda x, y: x.all(1),
    "count_nonzero": lambda x, y: x.count_nonzero(),
    "cumsum": lambda x, y: x.cumsum(1),
    "cumprod": lambda x, y: (y % 3).cumprod(1),
    "cummax": lambda x, y: tuple(x.cummax(1)),
    "sort": lambda x, y: x.sort(1).values,
    "sort, descending": lambda x, y: x.sort(0, descending=True).values,
    "argsort": lambda x, y: x.argsort(1, stable=True),
    "topk": lambda x, y: x.topk(2).values,
    "median": lambda x, y: x.median(),
    "std": lambda x, y: (x / 16).std(1),
    "var": lambda x, y: (x / 16).var(1),
    "norm": lambda x, y: (x / 16).norm(dim=1),
    "vector_norm, inf": lambda x, y: torch.linalg.vector_norm(x, torch.inf),
    "trace": lambda x, y: x.trace(),
    "diff": lambda x, y: x.diff(),
}
INDEX: dict[str, Binary] = {
    "index_select": lambda x, y: x.index_select(0, _I),
    "gather": lambda x, y: x.gather(1, _I.expand(3, 3)),
    "embedding": lambda x, y: F.embedding(_I, x),
    "indexed": lambda x, y: x[_I, _I],
    "indexed by bytes": lambda x, y: x[torch.tensor([True, False, True])],
    "slice": lambda x, y: x[1:, ::2],
    "select": lambda x, y: x[:, 1],
    "index_put": lambda x, y: x.index_put((_I,), y),
    "index_put, add": lambda x, y: x.index_put((torch.tensor([0, 0]),), y[:2], accumulate=True),
    "index_add": lambda x, y: x.index_add(0, torch.tensor([0, 0, 1]), y),
    "index_copy": lambda x, y: x.index_copy(0, _I, y),
    "index_fill": lambda x, y: x.index_fill(1, _I, 1),
    "scatter": lambda x, y: x.scatter(0, _I[None, :], y),
    "scatter, number": lambda x, y: x.scatter(0, _I[None, :], 1),
    "scatter_add": lambda x, y: x.scatter_add(0, torch.zeros(3, 4, dtype=torch.int64), y),
    "scatter_reduce": lambda x, y: x.scatter_reduce(0, torch.zeros(3, 4, dtype=torch.int64), y, "amax"),
    "masked_scatter": lambda x, y: x.masked_scatter(x > y, y),
    "take": lambda x, y: x.take(_I),
    "slice_scatter": lambda x, y: torch.slice_scatter(x, y[:1], 0, 1, 2),
    "select_scatter": lambda x, y: torch.select_scatter(x, y[0], 0, 1),
    "written in place": lambda x, y: x.clone().index_fill_(0, _I[:1], 1),
    "searchsorted": lambda x, y: torch.searchsorted(x[0].sort().values, y[0]),
    "bucketize": lambda x, y: torch.bucketize(x, torch.tensor([0, 1, 2], dtype=x.dtype)),
}
SHAPE: dict[str, Binary] = {
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y], 1),
    "split": lambda x, y: x.split([1, 2]),
    "chunk": lambda x, y: x.chunk(2, 1),
    "unbind": lambda x, y: x.unbind(),
    "expand": lambda x, y: x[:1].expand(3, 4),
    "repeat": lambda x, y: x.repeat(2, 1),
    "repeat_interleave": lambda x, y: x.repeat_interleave(2, 0),
    "flip": lambda x, y: x.flip(0),
    "roll": lambda x, y: x.roll(1, 0),
    "transpose": lambda x, y: x.t(),
    "reshape": lambda x, y: x.reshape(2, 6),
    "unsqueeze": lambda x, y: x.unsqueeze(0).squeeze(),
    "pad": lambda x, y: F.pad(x, (1, 2), value=1),
    "pad, reflect": lambda x, y: F.pad(x, (1, 2), mode="reflect"),
    "pad, replicate": lambda x, y: F.pad(x, (1, 2), mode="replicate"),
    "tril": lambda x, y: x.tril(),
    "triu": lambda x, y: x.triu(1),
    "diag": lambda x, y: x[0].diag(),
    "diagonal": lambda x, y: x.diagonal(),
    "unfold": lambda x, y: x.unfold(1, 2, 1),
    "meshgrid": lambda x, y: torch.meshgrid(x[0], y[0], indexing="ij"),
    "zeros_like": lambda x, y: torch.zeros_like(x) + x,
    "ones_like": lambda x, y: torch.ones_like(x) & x if not x.is_floating_point() else torch.ones_like(x) * x,
    "full_like": lambda x, y: torch.maximum(torch.full_like(x, 3), x),
    "new_tensor": lambda x, y: torch.minimum(x, torch.tensor(1, dtype=x.dtype)),
    "clone": lambda x, y: x.clone(),
    "contiguous": lambda x, y: x.t().contiguous(),
    "one_hot": lambda x, y: F.one_hot((x % 4).abs().long() % 4, 4),
    "pixel_shuffle": lambda x, y: F.pixel_shuffle(x.reshape(1, 4, 1, 3), 2),
    "interpolate": lambda x, y: F.interpolate(x[None], scale_factor=2.0),
    "interpolate, linear": lambda x, y: F.interpolate(x[None], scale_factor=2.0, mode="linear"),
    "broadcast": lambda x, y: torch.broadcast_tensors(x, y[:1])[1],
    **{
        f"to {dtype}".replace("torch.", ""): lambda x, y, dtype=dtype: (
            x.clamp(-1, 100).to(dtype) if x.dtype != torch.bool else x.to(dtype)
        )
        for dtype in (*DTYPES, torch.float32)
    },
}
PRODUCT: dict[str, Binary] = {
    "matmul": lambda x, y: x @ y.t(),
    "mm": lambda x, y: torch.mm(x, y.t()),
    "bmm": lambda x, y: torch.bmm(x[None], y.t()[None]),
    "mv": lambda x, y: x @ y[0],
    "dot": lambda x, y: x[0] @ y[0],
    "outer": lambda x, y: torch.outer(x[0], y[0]),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "linear": lambda x, y: F.linear(x, y, y[:, 0]),
    "addmm": lambda x, y: torch.addmm(x[:, :3], x, y.t()),
    "baddbmm": lambda x, y: torch.baddbmm(x[None, :, :3], x[None], y.t()[None]),
    "tensordot": lambda x, y: torch.tensordot(x, y, ([1], [1])),
    "conv1d": lambda x, y: F.conv1d(x[None], y[:, :2].reshape(2, 3, 1)),
    "conv2d": lambda x, y: F.conv2d(x[None, None], y[None, None, :2, :2], padding=1),
    "conv_transpose1d": lambda x, y: F.conv_transpose1d(x[None], y[:, :2].reshape(3, 2, 1)),
    "max_pool1d": lambda x, y: F.max_pool1d(x[None], 2),
    "max_pool2d": lambda x, y: F.max_pool2d(x[None, None], 2),
    "avg_pool1d": lambda x, y: F.avg_pool1d(x[None], 2),
    "adaptive_avg_pool1d": lambda x, y: F.adaptive_avg_pool1d(x[None], 2),
    "attention": lambda x, y: F.scaled_dot_product_attention(
        x[None, None] / 64, y[None, None] / 64, y[None, None]
    ),
    "cdist": lambda x, y: torch.cdist(x, y),
    "cosine_similarity": lambda x, y: F.cosine_similarity(x, y),
    "cross": lambda x, y: torch.linalg.cross(x[:, :3], y[:, :3]),
    "kron": lambda x, y: torch.kron(x, y),
}
OPERATORS: dict[str, Binary] = {
    **ARITHMETIC,
    **COMPARISON,
    **FLOATING,
    **REDUCTION,
    **INDEX,
    **SHAPE,
    **PRODUCT,
}


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of ``dtype``, of integers with the ends of their range, the second without a zero."""
    if dtype == torch.bool:
        x = torch.arange(12).reshape(3, 4) % 3 == 0
        return x, torch.ones_like(x)
    if dtype.is_floating_point:
        x = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 0.5, 3.0, 7.0, -6.0, 20.0, 0.125], dtype=dtype)
        y = torch.tensor([1.0, -2.0, 2.5, 0.5, 1.5, -3.0, 4.0, 1.0, -1.0, 2.0, 3.0, -0.5], dtype=dtype)
        return x.reshape(3, 4), y.reshape(3, 4)
    info = torch.iinfo(dtype)
    numbers = [0, 1, -1, 2, info.max, info.min, 100, -100, 5, 7, -3, 3]
    x = torch.tensor(numbers).to(dtype)
    y = torch.tensor([1, -1, 2, 3, 5, -7, 100, info.max, -2, 1, 2, -3]).to(dtype)
    return x.reshape(3, 4), y.reshape(3, 4)


class Several(torch.nn.Module):
    """Several operators of the same two tensors."""

    def __init__(self, operators: Mapping[str, Binary]) -> None:
        super().__init__()
        self.operators = dict(operators)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        """The result of each, by name."""
        results = {name: operator(x, y) for name, operator in self.operators.items()}
        return {n: tuple(r) if isinstance(r, (tuple, list)) else r for n, r in results.items()}


def of_dtype(dtype: torch.dtype) -> dict[str, Binary]:
    """The operators that eager PyTorch has for ``dtype``."""
    x, y = operands(dtype)
    found = {}
    for name, operator in OPERATORS.items():
        try:
            operator(x.clone(), y.clone())
        except (RuntimeError, TypeError, IndexError):
            continue
        if dtype is torch.bool and name in _UNTRACEABLE_OF_BOOLS:
            continue
        found[name] = operator
    return found


def outcome(operators: Mapping[str, Binary], dtype: torch.dtype, run: Callable[..., Any]) -> dict[str, str]:
    """The differences from eager PyTorch, by the operator's name.

    Args:
        operators: operators to run in one graph.
        dtype: dtype of their operands.
        run: called with a model and its operands; returns its results on ONNX Runtime.
    """
    x, y = operands(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Several(operators).eval()
        eager = model(x.clone(), y.clone())
        found = run(model, x.clone(), y.clone())
    return {n: text for n in operators if (text := difference(found[n], eager[n], dtype))}


def exported(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    """The results of an export."""
    return torch2ort.export(model, (x, y))(x, y)


def difference(one: Any, other: Any, dtype: torch.dtype) -> str:
    """Describe how the first differs from the second; empty if it does not."""
    dtypes = {dtype, *(t.dtype for t in (other if isinstance(other, tuple) else (other,)))}
    rtol, atol = max(_TOLERANCES.get(d, (1e-5, 1e-6)) for d in dtypes if d == dtype or d.is_floating_point)
    try:
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        return str(error)
    return ""


def gradient(of: torch.Tensor) -> torch.Tensor:
    """A gradient of a result's shape and dtype, whose numbers differ from each other."""
    return torch.linspace(0.3, 1.7, of.numel()).reshape(of.shape).to(of.dtype)
