"""Numbers near 0 and 1 are not simplified away: results match eager PyTorch's bits and signs of zeros."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch

import torch2ort
from torch2ort.runtime import version

ARITHMETIC: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "x + c": lambda x, c: x + c,
    "c + x": lambda x, c: c + x,
    "x - c": lambda x, c: x - c,
    "c - x": lambda x, c: c - x,
    "x * c": lambda x, c: x * c,
    "x / c": lambda x, c: x / c,
    "c / x": lambda x, c: c / x,
    "x + c + c": lambda x, c: x + c + c,
    "x * c * c": lambda x, c: x * c * c,
    "(x * c + c) / (1 + c) - c": lambda x, c: (x * c + c) / (1 + c) - c,
    "addcmul": lambda x, c: torch.addcmul(x, x, x, value=c),
    "addcdiv": lambda x, c: torch.addcdiv(x, x, torch.full_like(x, 3), value=c),
    "x + tensor": lambda x, c: x + torch.tensor(c, dtype=x.dtype),
}
# Of two zeros of different sign, the operators behind ARITHMETIC may return either.
CALLS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    **ARITHMETIC,
    "maximum": lambda x, c: torch.maximum(x, torch.tensor(c, dtype=x.dtype)),
    "minimum": lambda x, c: torch.minimum(x, torch.tensor(c, dtype=x.dtype)),
    "where": lambda x, c: torch.where(x > c, x, c),
    "x == c": lambda x, c: (x == c).to(x.dtype),
    "x ** c": lambda x, c: x**c,
}


def _numbers(dtype: torch.dtype) -> list[float]:
    """Constants that are nearly neutral, as the dtype represents them, without duplicates."""
    kind = torch.finfo(dtype)
    near = [0.0, -0.0, kind.tiny * kind.eps, 1e-10, 1e-8, 1e-5, 1.0, 1 + kind.eps, 1 - kind.eps / 2, 1.000005]
    values = torch.tensor([*near, math.inf, math.nan], dtype=dtype)
    return list({repr(value): value for value in values.tolist()}.values())


def _inputs(names: Sequence[str], dtype: torch.dtype) -> torch.Tensor:
    """A row for each operator and constant, so that each has a gradient of its own."""
    kind = torch.finfo(dtype)
    values = [0.0, -0.0, kind.tiny * kind.eps, kind.tiny, 1e-4, 1, -1, 1 + kind.eps, 0.75, -2.5, math.inf]
    row = torch.tensor([*values, -math.inf, math.nan], dtype=dtype)
    return row.repeat(len(names), len(_numbers(dtype)), 1)


class Sweep(torch.nn.Module):
    """Each operator with each constant, in one graph."""

    def __init__(self, names: Sequence[str], dtype: torch.dtype) -> None:
        super().__init__()
        self.names, self.numbers = names, _numbers(dtype)
        self.scale = torch.nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results = []
        for name, part in zip(self.names, (x * self.scale).unbind(), strict=True):
            results += [CALLS[name](row, c) for row, c in zip(part.unbind(), self.numbers, strict=True)]
        return torch.stack(results).reshape(x.shape)


def _differences(
    model: Sweep, x: torch.Tensor, expected: torch.Tensor, found: torch.Tensor, *, signs: bool
) -> list[str]:
    close = torch.isclose(found, expected, rtol=4 * torch.finfo(x.dtype).eps, atol=0, equal_nan=True)
    if signs:
        of_choice = torch.tensor([name not in ARITHMETIC for name in model.names])[:, None, None]
        close &= (expected.signbit() == found.signbit()) | expected.isnan() | of_choice
    return [
        f"{model.names[i]} of {x[i, j, k].item()!r}, {model.numbers[j]!r}: "
        f"{found[i, j, k].item()!r}, not {expected[i, j, k].item()!r}"
        for i, j, k in (~close).nonzero().tolist()
    ]


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        pytest.param([*CALLS], torch.float32, id="float32"),
        pytest.param(["x + c", "x - c", "x * c", "x / c", "addcmul"], torch.float64, id="float64"),
        # The others round more than once, to half precision or, in ONNX Runtime, to float32.
        pytest.param(["x + c", "x - c", "x * c"], torch.float16, id="float16"),
        pytest.param(["x + c", "x - c", "x * c"], torch.bfloat16, id="bfloat16"),
    ],
)
def test_an_exported_graph_drops_no_number(names: list[str], dtype: torch.dtype) -> None:
    model, x = Sweep(names, dtype).eval(), _inputs(names, dtype)
    with torch.no_grad():
        assert _differences(model, x, model(x), torch2ort.export(model, x)(x), signs=True) == []


@pytest.mark.skipif(version() < (1, 20), reason="onnxruntime-training 1.19.2 drops 0.0 that is added to -0.0")
class Ones(torch.nn.Module):
    """Products with ones: of the input's sizes, and of more dimensions."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.arange(math.prod(self.sizes)) >= 0).to(x.dtype).reshape(self.sizes)


@pytest.mark.parametrize(("sizes", "operators"), [((3, 1), ["Identity"]), ((2, 1, 1), ["Mul"])])
def test_a_product_with_ones_is_left_out_where_it_has_its_sizes(sizes, operators) -> None:
    model, x = Ones(*sizes).eval(), torch.tensor([[-0.0, math.nan]] * 3)
    exported = torch2ort.export(model, x)
    assert [node.op_type for node in exported.proto.graph.node if node.op_type != "Constant"] == operators
    torch.testing.assert_close(exported(x), model(x), rtol=0, atol=0, equal_nan=True)


def test_a_wrapped_module_drops_no_number_in_forward_and_gradient() -> None:
    names = ["x + c", "x - c", "x * c", "x / c", "c / x", "x ** c"]
    model, x = Sweep(names, torch.float32), _inputs(names, torch.float32)
    results, grads = zip(*(_trained(run, x) for run in (model, torch2ort.ORTModule(model))), strict=True)
    assert _differences(model, x, *results, signs=True) == []
    assert _differences(model, x, *grads, signs=False) == []


def _trained(
    run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    given = x.clone().requires_grad_()
    result = run(given)
    return result.detach(), torch.autograd.grad(
        result, given, torch.linspace(1, 2, x.numel()).reshape(x.shape)
    )[0]


class _Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x * self.weight
        return h / (h.sum(1, keepdim=True) + 1e-8), torch.log(h + 1e-9), h * 1.000005, h / 1.000005, h - 1e-9


def test_a_compiled_module_drops_no_number() -> None:
    model = _Small()
    x = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
    expected, found = model(x), torch.compile(model, backend="torch2ort")(x)
    torch.testing.assert_close(found, expected, rtol=2e-7, atol=0)


def test_what_is_nearly_a_gelu_is_none() -> None:
    class NearlyGelu(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 0.5 * x * (1.000005 + torch.erf(x / math.sqrt(2)))

    model, x = NearlyGelu(), torch.tensor([-6.0, -5.0, -1.0, 0.5, 3.0])
    torch.testing.assert_close(torch2ort.export(model, x)(x), model(x), rtol=1e-2, atol=0)


@pytest.mark.parametrize("way", ["export", "ORTModule"])
def test_a_factor_is_multiplied_in_front_of_a_product(way: str) -> None:
    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x * 1e-30) @ y

    x, y = torch.full((2, 3), 1e20), torch.full((3, 2), 1e25)
    run = torch2ort.export(Scaled(), (x, y)) if way == "export" else torch2ort.ORTModule(Scaled())
    torch.testing.assert_close(run(x, y), Scaled()(x, y))
