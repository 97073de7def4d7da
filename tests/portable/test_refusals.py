"""Functions that have no body, and the messages about them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Function

import torch2ort
from tests.portable.portable_models import export, in_a_plain_session


class Item(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()


class Branch(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x * 2
        return x


class SizeBranch(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 3 else x * 3


class NumPy(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * 2)


class Random(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


class Asks(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.compiler.is_exporting() else x * 3


REMEDY = (
    "Write forward without it, register an exporter with torch2ort.register_exporter, or export without "
    "portable=True, which keeps the call as a PythonOp"
)
REFUSED = {
    "item": (Item, "forward reads a value out of a tensor"),
    "branch": (Branch, "forward reads a value out of a tensor"),
    "size": (SizeBranch, "forward branches on the size of a tensor"),
    "numpy": (NumPy, "forward does not run without data"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_without_a_body_is_refused_with_its_line_and_cause(name: str) -> None:
    function, sentence = REFUSED[name]
    where = r" at .*test_refusals.py:\d+ in forward \(.*\)"
    with pytest.raises(torch2ort.ExportError, match=sentence + where) as caught:
        export(function.apply, torch.randn(2, 3).abs())
    assert str(caught.value).startswith(f"{__name__}.{function.__name__} is not portable: ")
    assert str(caught.value).endswith(f". {REMEDY}")
    assert isinstance(caught.value.__cause__, Exception)


def test_a_function_that_draws_random_numbers_is_refused() -> None:
    with pytest.raises(torch2ort.ExportError, match=r"Random is not portable: .* draws random numbers"):
        export(Random.apply, torch.randn(2, 3))


def test_a_body_that_differs_from_forward_is_refused_with_the_difference() -> None:
    with pytest.raises(torch2ort.ExportError) as caught:
        export(Asks.apply, torch.ones(2, 3))
    assert str(caught.value) == (
        f"{__name__}.Asks is not portable: its body does not compute the same as forward on the sample; "
        f"output 0 differs by up to 1. Forward may depend on more than its arguments; write it without that, "
        f"{REMEDY.partition(', ')[2]}"
    )


class Checked(Function):
    """Raises for some sizes, and does not branch on any."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] % 2 == 0
        if x.shape[0] > 100:
            raise ValueError("too large")
        return x.view(x.shape[0], -1, 2).sum(-1) / math.sqrt(x.shape[1])


def test_a_function_that_checks_sizes_has_a_body() -> None:
    x = torch.randn(3, 4)
    exported = export(Checked.apply, x)
    torch.testing.assert_close(in_a_plain_session(exported, x)[0], Checked.apply(x))


class Bessel(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(x)


def test_an_operator_that_onnx_lacks_is_refused() -> None:
    with pytest.raises(torch2ort.UnsupportedOperatorError, match="Bessel is not portable: ONNX has no op"):
        export(Bessel.apply, torch.randn(3, 3))


def test_an_operator_of_the_model_that_onnx_lacks_is_refused() -> None:
    with pytest.raises(torch2ort.UnsupportedOperatorError, match="the model is not portable: ONNX has no op"):
        export(lambda x: torch.special.bessel_j0(x), torch.randn(3, 3))


def test_training_mode_is_refused() -> None:
    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.export(nn.Linear(3, 4), torch.randn(2, 3), training=True, portable=True)
    assert str(caught.value) == (
        "export: portable=True is for inference, and training is True; leave out training, or pass "
        "training=False"
    )


def test_a_model_in_training_mode_is_exported_in_evaluation_mode() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.9)), torch.randn(2, 3)
    exported = torch2ort.export(model, x, portable=True)
    assert not exported.training
    assert model.training
    torch.testing.assert_close(exported(x), model.eval()(x))


def test_an_argument_that_no_file_holds_is_refused() -> None:
    class Scale:
        value = 2.0

    class Scaled(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, scale: Scale) -> torch.Tensor:
            return x * scale.value

    with pytest.raises(torch2ort.ExportError, match="argument 1 is an object of type"):
        export(lambda x: Scaled.apply(x, Scale()), torch.randn(2, 3))


class Pairs(Function):
    """Supports an even number of rows alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, 2, x.shape[1]).sum(1)


class Rows(Function):
    """Loops over rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[i] * i for i in range(x.shape[0])])


def test_a_function_that_loops_over_a_size_that_varies_is_refused() -> None:
    with pytest.raises(torch2ort.ExportError) as caught:
        export(Rows.apply, torch.randn(4, 3), dynamic_shapes={"x": {0: "batch"}})
    assert str(caught.value) == (
        f"{__name__}.Rows is not portable: the trace of forward is valid only where x.shape[0] == 4, and "
        f"that size varies in the model. Export the model with that size fixed, {REMEDY.partition(', ')[2]}"
    )


def test_a_function_that_loops_over_a_fixed_size_has_a_body() -> None:
    x = torch.randn(4, 3)
    torch.testing.assert_close(in_a_plain_session(export(Rows.apply, x), x)[0], Rows.apply(x))


def test_a_function_takes_the_sizes_that_its_operators_take() -> None:
    exported = export(Pairs.apply, torch.randn(4, 3), dynamic_shapes={"x": {0: "batch"}})
    x = torch.randn(10, 3)
    torch.testing.assert_close(in_a_plain_session(exported, x)[0], Pairs.apply(x))
    with pytest.raises(torch2ort.SchemaMismatchError):
        exported(torch.randn(5, 3))


class Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


def test_two_tensors_of_one_size_that_varies_have_a_body() -> None:
    exported = export(lambda x: Sum.apply(x, x * 2), torch.randn(4, 3), dynamic_shapes={"x": {0: "batch"}})
    x = torch.randn(7, 3)
    torch.testing.assert_close(in_a_plain_session(exported, x)[0], x * 3)
