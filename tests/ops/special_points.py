"""Operators at the points where derivatives are easily got wrong: kinks, ties, zeros, very large numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from tests.ops.snippets import TORCH_2_11

Unary = Callable[[torch.Tensor], torch.Tensor]

# All of one size, so that one graph accepts them; kernels treat many numbers differently from few.
_COUNT = 100


def _often(points: list[float]) -> torch.Tensor:
    """The points, repeated."""
    return torch.tensor([points[i % len(points)] for i in range(_COUNT)])


# Zero of both signs, whole numbers at which activations have kinks, and numbers near them, small and large.
FINITE = _often(
    [
        0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, -1.5, 2.0, -2.0, 2.5, 3.0, -3.0, 3.0000002, -3.0000002,
        2.9999998, 4.0, 6.0, -6.0, 20.0, 21.0, -20.0, 1e-30, -1e-30, 1e-8, -1e-8, 1e-4, -1e-4,
        50.0, -50.0, 88.0, -88.0, 1e4, -1e4, 1e20, -1e20, 1e30, -1e30,
    ]
)  # fmt: skip
ENDLESS = _often([math.inf, -math.inf, math.nan])
# Less than 1.2e-38: subnormal numbers, with fewer digits.
SMALLEST = _often([1e-40, -1e-40, 1e-45, 1e-38, -1e-38, 0.0, -0.0, 1.0])
_ENDS = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 3e38])
PAIRS = tuple(t.reshape(-1).contiguous() for t in torch.meshgrid(_ENDS, _ENDS, indexing="ij"))

UNARY: dict[str, Unary] = {
    "abs": lambda x: x.abs(),
    "neg": lambda x: -x,
    "sign": lambda x: x.sign() * 2,
    "relu": lambda x: F.relu(x),
    "relu6": lambda x: F.relu6(x),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "leaky_relu, negative": lambda x: F.leaky_relu(x, -0.2),
    "elu": lambda x: F.elu(x),
    "celu": lambda x: F.celu(x, 0.7),
    "selu": lambda x: F.selu(x),
    "gelu": lambda x: F.gelu(x),
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": lambda x: F.silu(x),
    "mish": lambda x: F.mish(x),
    "softplus": lambda x: F.softplus(x),
    "softplus, beta": lambda x: F.softplus(x, 3, 2),
    "logsigmoid": lambda x: F.logsigmoid(x),
    "sigmoid": lambda x: x.sigmoid(),
    "tanh": lambda x: x.tanh(),
    "hardsigmoid": lambda x: F.hardsigmoid(x),
    "hardswish": lambda x: F.hardswish(x),
    "hardtanh": lambda x: F.hardtanh(x),
    "hardtanh, other ends": lambda x: F.hardtanh(x, -3.0, 2.0),
    "hardshrink": lambda x: F.hardshrink(x),
    "softshrink": lambda x: F.softshrink(x),
    "tanhshrink": lambda x: F.tanhshrink(x),
    "softsign": lambda x: F.softsign(x),
    "threshold": lambda x: F.threshold(x, 1.0, -1.0),
    "rrelu": lambda x: F.rrelu(x, training=False),
    "prelu": lambda x: F.prelu(x, torch.full((1,), 0.3)),
    "clamp": lambda x: x.clamp(-1, 3),
    "clamp, min": lambda x: x.clamp(min=0),
    "clamp, max": lambda x: x.clamp(max=1),
    "clamp, empty": lambda x: x.clamp(2, 1),
    "clamp, tensors": lambda x: x.clamp(torch.tensor(-1.0), torch.tensor(3.0)),
    "sqrt": lambda x: x.sqrt(),
    "rsqrt": lambda x: x.rsqrt(),
    "reciprocal": lambda x: x.reciprocal(),
    "square": lambda x: x.square(),
    "pow 0": lambda x: x**0,
    "pow 1": lambda x: x**1,
    "pow 2": lambda x: x**2,
    "pow 3": lambda x: x**3,
    "pow 4": lambda x: x**4,
    "pow -1": lambda x: x**-1,
    "pow -2": lambda x: x**-2,
    "pow 0.5": lambda x: x**0.5,
    "pow -0.5": lambda x: x**-0.5,
    "pow 1.5": lambda x: x**1.5,
    "pow 1/3": lambda x: x ** (1 / 3),
    "number to a power": lambda x: 2.0**x,
    "zero to a power": lambda x: 0.0**x,
    "one to a power": lambda x: 1.0**x,
    "power of itself": lambda x: x**x,
    "power of a tensor": lambda x: x ** torch.full_like(x, 2.0),
    "power of zeros": lambda x: x ** torch.zeros_like(x),
    "exp": lambda x: x.exp(),
    "exp2": lambda x: x.exp2(),
    "expm1": lambda x: x.expm1(),
    "log": lambda x: x.log(),
    "log2": lambda x: x.log2(),
    "log10": lambda x: x.log10(),
    "log1p": lambda x: x.log1p(),
    "xlogy": lambda x: torch.xlogy(x, x.detach().abs()),
    "xlogy, second": lambda x: torch.xlogy(torch.zeros(()), x),
    "logit": lambda x: torch.logit(x),
    "logit, eps": lambda x: torch.logit(x, eps=1e-3),
    "sin": lambda x: x.sin(),
    "cos": lambda x: x.cos(),
    "tan": lambda x: x.tan(),
    "asin": lambda x: x.asin(),
    "acos": lambda x: x.acos(),
    "atan": lambda x: x.atan(),
    "sinh": lambda x: x.sinh(),
    "cosh": lambda x: x.cosh(),
    "asinh": lambda x: x.asinh(),
    "acosh": lambda x: x.acosh(),
    "atanh": lambda x: x.atanh(),
    "sinc": lambda x: x.sinc(),
    "erf": lambda x: x.erf(),
    "erfc": lambda x: x.erfc(),
    "erfinv": lambda x: x.erfinv(),
    "lgamma": lambda x: x.lgamma(),
    "digamma": lambda x: x.digamma(),
    "i0": lambda x: torch.i0(x),
    "floor": lambda x: x.floor() + x,
    "ceil": lambda x: x.ceil() + x,
    "round": lambda x: x.round() + x,
    "trunc": lambda x: x.trunc() + x,
    "frac": lambda x: x.frac(),
    "nan_to_num": lambda x: x.nan_to_num(),
    "deg2rad": lambda x: x.deg2rad(),
    "divided by itself": lambda x: x / x,
    "divided into": lambda x: 1 / x,
    "divided by zero": lambda x: x / torch.zeros(()),
    "remainder": lambda x: torch.remainder(x, 1.5),
    "fmod": lambda x: torch.fmod(x, 1.5),
    "where": lambda x: torch.where(x > 0, x, x * 0.1),
    "where, log": lambda x: torch.where(x > 0, x.log(), torch.zeros(())),
    "masked_fill": lambda x: x.masked_fill(x > 1, 2.0),
    "heaviside times": lambda x: torch.heaviside(x.detach(), torch.tensor(0.5)) * x,
}
# The same numbers as second operand, in the reverse order and once equal.
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "mul": torch.mul,
    "div": torch.div,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "copysign": torch.copysign,
    "logaddexp": torch.logaddexp,
    "pow": torch.pow,
    "lerp": lambda x, y: torch.lerp(x, y, 0.5),
    "l1_loss": lambda x, y: F.l1_loss(x, y, reduction="none"),
    "mse_loss": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "smooth_l1_loss": lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
    "smooth_l1_loss, beta": lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=2.0),
    "huber_loss": lambda x, y: F.huber_loss(x, y, reduction="none", delta=2.0),
    "bce_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, (y > 0).float(), reduction="none"),
}
# Rows with ties, with zeros, with infinities, and of one repeated number.
ROWS = torch.tensor(
    [
        [1.0, 2.0, 2.0, -1.0],
        [0.0, 0.0, 0.0, 0.0],
        [3.0, 3.0, 3.0, 3.0],
        [0.0, -0.0, 1e-30, 1e-40],
        [0.0, 2.0, 0.0, 5.0],
    ]
).repeat(12, 1)[:56]
# With NaN.
ODD_ROWS = torch.tensor(
    [
        [1.0, math.nan, 2.0, -1.0],
        [math.inf, -math.inf, math.nan, 0.0],
        [math.inf, math.inf, 1.0, -math.inf],
        [-math.inf] * 4,
        [math.nan] * 4,
        [0.0, -0.0, 1e-40, -1e-40],
        [2.0, 2.0, 1.0, 1.0],
    ]
).repeat(8, 1)
OF_ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": lambda x: x.max(-1).values,
    "min": lambda x: x.min(-1).values,
    "max of all": lambda x: x.max(),
    "min of all": lambda x: x.min(),
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin(-1),
    "amax of all": lambda x: x.amax(),
    "aminmax": lambda x: torch.stack(torch.aminmax(x, dim=-1)),
    "median": lambda x: x.median(-1).values,
    "nanmedian": lambda x: x.nanmedian(-1).values,
    "mode": lambda x: x.mode(-1).values,
    "kthvalue": lambda x: x.kthvalue(2, -1).values,
    "quantile": lambda x: x.quantile(0.4, -1),
    "sort": lambda x: x.sort(-1).values * torch.arange(1.0, 5),
    "sort, descending": lambda x: x.sort(-1, descending=True).values * torch.arange(1.0, 5),
    "sort, stable": lambda x: x.sort(stable=True, dim=-1).values * torch.arange(1.0, 5),
    "argmax": lambda x: x.argmax(-1) * x[..., 0].nan_to_num(),
    "argmin": lambda x: x.argmin(-1) * x[..., 0].nan_to_num(),
    "topk": lambda x: x.topk(2).values * torch.arange(1.0, 3),
    "cummax": lambda x: x.cummax(-1).values,
    "cummin": lambda x: x.cummin(-1).values,
    "prod": lambda x: x.prod(-1),
    "prod of all": lambda x: (x + 1).prod(),
    "cumprod": lambda x: x.cumprod(-1),
    "norm": lambda x: x.norm(dim=-1),
    "norm of all": lambda x: x.norm(),
    "norm 1": lambda x: x.norm(p=1, dim=-1),
    "norm 3": lambda x: x.norm(p=3, dim=-1),
    "norm inf": lambda x: x.norm(p=math.inf, dim=-1),
    "norm -inf": lambda x: x.norm(p=-math.inf, dim=-1),
    "vector_norm 0.5": lambda x: torch.linalg.vector_norm(x, 0.5, dim=-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(-1), dim=-1),
    "pairwise_distance": lambda x: F.pairwise_distance(x, x.flip(-1)),
    "cdist": lambda x: torch.cdist(x, x.detach()),
    "std": lambda x: x.std(-1),
    "var": lambda x: x.var(-1),
    "std, of a column": lambda x: x[:1, :2].std(0, unbiased=False),
    "logsumexp": lambda x: x.logsumexp(-1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "rms_norm": lambda x: F.rms_norm(x, (4,), eps=1e-6),
    "max_pool1d": lambda x: F.max_pool1d(x[:, None], 2, 1),
    "max_pool2d": lambda x: F.max_pool2d(x[None, None], 2, 1),
    "max_pool2d, padded": lambda x: F.max_pool2d(x[None, None], 3, 2, 1),
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x[:, None], 2),
    "maximum of its parts": lambda x: torch.maximum(x[:, :2], x[:, 2:]),
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "trapezoid": lambda x: torch.trapezoid(x),
    "cov of signs": lambda x: x.sign() * x.abs().amax(-1, keepdim=True),
}
if TORCH_2_11:
    del OF_ROWS["aminmax"], OF_ROWS["quantile"]

# Eager PyTorch's own kernels disagree, or the power of a negative number is NaN.
UNDEFINED_AT_INFINITY = frozenset({"gelu", "pow -0.5", "pow 1.5"})


class Points(torch.nn.Module):
    """Every operator in one graph, each of an input of its own, so that each has a gradient of its own."""

    def __init__(self, operators: dict[str, Callable[..., torch.Tensor]]) -> None:
        super().__init__()
        self.operators = operators

    def forward(self, inputs: dict[str, tuple[torch.Tensor, ...]]) -> dict[str, torch.Tensor]:
        """The result of each, by name."""
        return {name: call(*inputs[name]) for name, call in self.operators.items()}


def results(
    model: torch.nn.Module, names: list[str], points: tuple[torch.Tensor, ...]
) -> dict[str, list[torch.Tensor]]:
    """Output and gradients of each operator, by name."""
    inputs = {n: tuple(p.clone().requires_grad_() for p in points) for n in names}
    outputs = model(inputs)
    torch.autograd.backward(list(outputs.values()), [torch.ones_like(v) * 1.25 for v in outputs.values()])
    return {n: [outputs[n].detach(), *(t.grad for t in inputs[n])] for n in names}
