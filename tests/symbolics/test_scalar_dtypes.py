"""Python numbers in dtypes with values that float32 does not represent, and tensors made of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import torch2ort
from tests.support.sweeps import sample_cases
from tests.support.unary_op_model import Applied, Operator

LOWEST = torch.finfo(torch.float64).min
HALF = (torch.bfloat16, torch.float16)

# Functions of x, a float64 tensor of shape (3, 6, 8); each needs a number that float32 does not represent.
OF_DOUBLE: dict[str, Operator] = {
    "full": lambda x: torch.full((8,), 0.1, dtype=x.dtype) * x,
    "new_full": lambda x: x.new_full((8,), 0.1) * x,
    "full_like": lambda x: torch.full_like(x, 0.1) * x,
    "fill": lambda x: torch.empty_like(x).fill_(0.1) * x,
    "full, beyond float32": lambda x: torch.maximum(x, torch.full((), LOWEST, dtype=x.dtype)),
    "masked_fill": lambda x: x.masked_fill(x > 0, LOWEST).softmax(-1),
    "masked_fill, every one": lambda x: x.masked_fill(x < 99, LOWEST).softmax(-1),
    "linspace": lambda x: torch.linspace(0.1, 0.7, 8, dtype=x.dtype) * x,
    "linspace, one step": lambda x: torch.linspace(0.1, 0.7, 1, dtype=x.dtype) * x,
    "arange": lambda x: torch.arange(0.1, 0.9, 0.1, dtype=x.dtype) * x,
    "rsub": lambda x: 0.1 - x,
    "rsub, alpha": lambda x: torch.rsub(x, 0.1, alpha=0.3),
    "add, alpha": lambda x: torch.add(x, x, alpha=0.1),
    "sub, alpha": lambda x: torch.sub(x, x * x, alpha=0.1),
    "add of constants, alpha": lambda x: x * torch.ones(8).double().add(torch.ones(8).double(), alpha=0.1),
    "leaky_relu of a constant": lambda x: x * F.leaky_relu(_constant(), 0.3),
    "selu of a constant": lambda x: x * F.selu(_constant()),
    "hardsigmoid of a constant": lambda x: x * F.hardsigmoid(_constant()),
    "softplus of a constant": lambda x: x * F.softplus(_constant(), beta=0.3),
    "addcdiv": lambda x: torch.addcdiv(x, x, x.abs() + 1, value=0.1),
    "addcmul of constants": lambda x: x * torch.addcmul(_constant(), _constant(), _constant(), value=0.1),
    "a power of constants": lambda x: x * 0.3 ** _constant(),
    "norm": lambda x: x.norm(1.7),
    "norm of a constant": lambda x: x * _constant().norm(1.7),
    "deg2rad": torch.deg2rad,
    "affine_grid": lambda x: F.affine_grid(x[:, :2, :3], [3, 1, 4, 13], align_corners=False),
}
# A factor before or behind a product.
PRODUCTS: dict[str, Operator] = {
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "attention, row hidden": lambda x: F.scaled_dot_product_attention(
        x, x, x, (torch.arange(6) > 0).unsqueeze(1)
    ),
    "scaled before": lambda x: (x * 0.3) @ x.transpose(1, 2),
    "scaled after": lambda x: x @ x.transpose(1, 2) / 0.7,
    "baddbmm": lambda x: torch.baddbmm(x[:, :, :6], x, x.transpose(1, 2), beta=0.1, alpha=0.3),
    "addmm": lambda x: torch.addmm(x[0, :, :6], x[0], x[1].T, beta=0.1, alpha=0.3),
}


def _constant() -> torch.Tensor:
    return torch.arange(-4, 4, dtype=torch.float64)


def _x(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.linspace(-2, 2, 144, dtype=torch.float64).sin().reshape(3, 6, 8).to(dtype)


def _exported(operators: dict[str, Operator], x: torch.Tensor) -> dict[str, torch.Tensor]:
    results: dict[str, torch.Tensor] = torch2ort.export(Applied(operators).eval(), x)(x)
    return results


@contextlib.contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_numbers_of_double_keep_their_digits() -> None:
    operators = {**OF_DOUBLE, **PRODUCTS}
    expected = Applied(operators)(_x())
    torch.testing.assert_close(_exported(operators, _x()), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", PRODUCTS)
def test_factors_of_products_in_double_train_with_their_digits(name: str) -> None:
    model = Applied({name: PRODUCTS[name]})
    gradients = []
    for way in (torch2ort.ORTModule(Applied(model.operators)), model):
        x = _x().requires_grad_()
        way(x)[name].square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("step", sample_cases([0.1, 0.01, 0.3, 1 / 3, 0.7, -0.01], 2))
@pytest.mark.parametrize("start", [0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_range_of_fractions_has_as_many_as_in_eager(dtype: torch.dtype, start: float, step: float) -> None:
    end = start + (1 if step > 0 else -1)
    count = {"arange": lambda x: torch.arange(start, end, step, dtype=dtype) + x}
    x = torch.zeros(1, dtype=dtype)
    atol = 1e-2 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(_exported(count, x), Applied(count)(x), rtol=1e-6, atol=atol)


def test_a_range_of_fractions_up_to_a_size_that_varies_is_refused() -> None:
    class Counted(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.arange(0, x.shape[0] * 0.01, 0.01)

    with pytest.raises(torch2ort.UnsupportedOperatorError) as refusal:
        torch2ort.export(Counted().eval(), torch.ones(7), dynamic_shapes={"x": {0: "n"}})
    told = "would run in PyTorch's kernel, which takes no size that varies as an argument"
    assert told in str(refusal.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_what_is_made_without_a_dtype_has_the_default_one(dtype: torch.dtype) -> None:
    made: dict[str, Operator] = {
        "linspace": lambda x: x + torch.linspace(-1, 1, 8),
        "arange": lambda x: x + torch.arange(0.0, 0.8, 0.1).cumsum(0),
        "full": lambda x: x + torch.full((8,), 0.1),
        "zeros and ones": lambda x: torch.zeros(8) + torch.ones(8) * 0.1,
        "hann_window": lambda x: x + torch.hann_window(8),
        "scalar_tensor": lambda x: x + torch.scalar_tensor(0.1),
        "attention": lambda x: F.scaled_dot_product_attention(x, x, x, torch.full((6, 6), 0.1)),
        "binary_cross_entropy": lambda x: F.binary_cross_entropy_with_logits(
            x, torch.full((3, 6, 8), 0.3), pos_weight=torch.arange(1.0, 9)
        ),
    }
    with _default(dtype):
        found, expected = _exported(made, _x(dtype)), Applied(made)(_x(dtype))
    rtol, atol = (1e-9, 1e-12) if dtype is torch.float64 else (3e-2, 1e-2)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_is_compared_with_a_number_in_its_own_type(dtype: torch.dtype) -> None:
    compared: dict[str, Operator] = {
        "eq": lambda x: x == 0.1,
        "ne": lambda x: x != 0.1,
        "lt": lambda x: x < 0.1,
        "le": lambda x: x <= 0.1,
        "gt": lambda x: x > 0.1,
        "ge": lambda x: x >= 0.1,
        "hardshrink": lambda x: F.hardshrink(x, 0.1),
    }
    x = torch.tensor([0.05, 0.1, 0.2]).to(dtype)
    torch.testing.assert_close(_exported(compared, x), Applied(compared)(x), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_quotient_of_half_precision_is_cut_before_it_is_rounded(dtype: torch.dtype) -> None:
    cut = {"trunc": lambda x: torch.div(x, 0.3, rounding_mode="trunc")}
    x = torch.arange(-4, 4, 0.01).to(dtype)
    torch.testing.assert_close(_exported(cut, x), Applied(cut)(x), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_where_eager_rounds_inside_of_an_operator_a_file_is_within_the_bounds_of_double(
    dtype: torch.dtype,
) -> None:
    rounded: dict[str, Operator] = {
        "instance_norm": F.instance_norm,
        "nll_loss": lambda x: F.nll_loss(x, torch.zeros(3, 8, dtype=torch.int64), reduction="sum"),
        "cross": lambda x: torch.linalg.cross(x[:, :, :3], x[:, :, 3:6]),
    }
    found = _exported(rounded, _x(dtype))
    exact = {name: value.to(dtype) for name, value in Applied(rounded)(_x(dtype).double()).items()}
    rtol, atol = (4e-3, 1e-3) if dtype is torch.float16 else (3e-2, 1e-2)
    torch.testing.assert_close(found, exact, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_an_exported_grid_sample_of_half_precision_looks_where_eager_does(
    mode: str, padding: str, dtype: torch.dtype
) -> None:
    grid = torch.linspace(-1.1, 1.1, 1600).sin().reshape(2, 20, 20, 2).to(dtype)
    image = torch.linspace(-9, 9, 1530).cos().reshape(2, 3, 15, 17).to(dtype)
    sampled = {"x": lambda x: F.grid_sample(x, grid, mode=mode, padding_mode=padding, align_corners=False)}
    torch.testing.assert_close(_exported(sampled, image), Applied(sampled)(image), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF], ids=str)
def test_a_convolution_of_volumes_may_have_no_bias(dtype: torch.dtype) -> None:
    model = torch.nn.Conv3d(3, 4, (2, 3, 1), stride=(1, 2, 1), padding=(1, 0, 0), bias=False).to(dtype)
    x = torch.linspace(-1, 1, 270).reshape(1, 3, 3, 6, 5).to(dtype)
    exported = torch2ort.export(model.eval(), x)
    rtol, atol = {torch.float16: (4e-3, 1e-3), torch.bfloat16: (3e-2, 1e-2)}.get(dtype, (1e-5, 1e-6))
    torch.testing.assert_close(exported(x), model(x), rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_row_that_is_hidden_wholly_gives_zeros_in_half_precision(dtype: torch.dtype) -> None:
    hidden = {"attention": PRODUCTS["attention, row hidden"]}
    found, expected = torch2ort.ORTModule(Applied(hidden)), Applied(hidden)
    torch.testing.assert_close(found(_x(dtype)), expected(_x(dtype)), rtol=0, atol=0)


@pytest.mark.parametrize("length", [7, 10])
def test_an_inverse_fourier_transform_in_double_is_refused_where_its_length_is_no_power_of_two(
    length: int,
) -> None:
    inverse = {"irfft": lambda x: torch.fft.irfft(torch.fft.rfft(x), length)}
    with pytest.raises(torch2ort.UnsupportedOperatorError) as refusal:
        _exported(inverse, _x())
    told = (
        "inverts a Fourier transform in torch.float64, which ONNX Runtime divides by its length with the "
        "digits of torch.float32. Choose a power of two as its length, convert to torch.float32, or put the "
        "transform and what computes with it into a torch.autograd.Function"
    )
    assert told in str(refusal.value)


@pytest.mark.parametrize(("length", "dtype"), [(8, torch.float64), (7, torch.float32)])
def test_another_inverse_fourier_transform_is_eagers(length: int, dtype: torch.dtype) -> None:
    inverse = {"irfft": lambda x: torch.fft.irfft(torch.fft.rfft(x), length)}
    rtol, atol = (1e-9, 1e-12) if dtype is torch.float64 else (1e-5, 1e-6)
    torch.testing.assert_close(
        _exported(inverse, _x(dtype)), Applied(inverse)(_x(dtype)), rtol=rtol, atol=atol
    )
