"""The arguments of forward, and the results that it may return."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.runtime_ext.calls import InRun, check_against_eager, error_of, make_site, run_forward
from torch2ort.errors import EngineError
from torch2ort.pythonop.native import native

Function = torch.autograd.Function
# test_memory_aliasing tests the warnings about aliasing.
pytestmark = pytest.mark.filterwarnings("ignore::torch2ort.errors.Torch2OrtWarning")


def data(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


class Record(Function):
    seen: list[Any]

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        Record.seen = [ctx.needs_input_grad, *args]
        return args[0] * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient, *[None] * (len(ctx.needs_input_grad) - 1)


@pytest.mark.parametrize(
    "constant",
    [
        0.1,
        1e-320,
        float("inf"),
        True,
        2**70,
        "text",
        None,
        (1, (2.5, False)),
        [1],
        {"a": 1},
        pytest.param(object(), id="object()"),
        torch.float16,
    ],
    ids=repr,
)
def test_constants_are_the_very_objects(constant: object) -> None:
    x = data(2)
    site = make_site(Record, x, constant)
    run_forward(site, x)
    assert Record.seen[2] is constant


def test_a_needed_floating_argument_requires_grad_as_in_eager() -> None:
    arguments = [data(2), torch.ones(2), torch.ones(2, dtype=torch.int64), 7]
    site = make_site(Record, *arguments)
    Record.apply(*arguments)
    eager = [(Record.seen[0], [a.requires_grad for a in Record.seen[1:4]])]
    run_forward(site, *arguments[:3])
    assert [(Record.seen[0], [a.requires_grad for a in Record.seen[1:4]])] == eager


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (2, 3, 4)], ids=str)
def test_shapes_of_every_kind_pass(shape: tuple[int, ...]) -> None:
    x = data(*shape)
    check_against_eager(Record, x, gradients=[torch.ones(shape)])


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=lambda d: str(d)
)
def test_floating_dtypes_pass(dtype: torch.dtype) -> None:
    x = torch.randn(3).to(dtype).requires_grad_()
    check_against_eager(Record, x, gradients=[torch.ones(3, dtype=dtype)])


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool], ids=str
)
def test_other_dtypes_pass(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1]).to(dtype)
    site = make_site(Record, x)
    (y,) = run_forward(site, x)
    torch.testing.assert_close(y, x * 1, rtol=0, atol=0)


def test_a_dtype_that_was_not_exported_is_refused() -> None:
    site = make_site(Record, data(2))
    error = error_of(run_forward, site, torch.ones(2, dtype=torch.float64))
    assert isinstance(error, EngineError)
    assert str(error) == (
        f"{__name__}.Record: tensor argument 0 was exported as float32, but a tensor of float64 arrived"
    )


class Setup(Function):
    @staticmethod
    def forward(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, float]:
        return x * factor, factor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        assert type(inputs) is tuple
        assert output[1] is inputs[1]
        x, ctx.factor = inputs
        ctx.save_for_backward(x, output[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, nothing: None) -> tuple[torch.Tensor, None]:
        assert nothing is None
        x, y = ctx.saved_tensors
        return gradient * ctx.factor + x + y, None


def test_setup_context_gets_arguments_and_output() -> None:
    check_against_eager(Setup, data(2, 3), 1.5, gradients=[torch.ones(2, 3)])


class Write(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        buffer.add_(x.detach())
        ctx.mark_dirty(buffer)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * 2, None


def test_a_written_argument_is_a_copy_and_becomes_the_last_output() -> None:
    x, buffer = torch.ones(3), torch.full((3,), 5.0)
    site = make_site(Write, data(3), buffer)
    with torch.no_grad():
        outputs = run_forward(site, x, buffer)
    torch.testing.assert_close(outputs, [torch.full((3,), 2.0), torch.full((3,), 6.0)])
    assert buffer.tolist() == [5.0] * 3


class WriteAndReturn(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


def test_a_written_argument_that_is_returned_is_no_output_of_its_own() -> None:
    site = make_site(WriteAndReturn, data(3))
    (y,) = run_forward(site, torch.ones(3))
    assert y.tolist() == [3.0] * 3


class WriteSometimes(Function):
    write = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if WriteSometimes.write:
            x[:1] = 0
        return x * 2


def test_a_write_that_export_did_not_see_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    site = make_site(WriteSometimes, data(3))
    monkeypatch.setattr(WriteSometimes, "write", True)
    error = error_of(run_forward, site, torch.ones(3))
    assert isinstance(error, EngineError)
    assert str(error) == (
        f"{__name__}.WriteSometimes: forward wrote to argument 0, but did not when it was exported: write to "
        "a clone(), or mark the argument with ctx.mark_dirty() whenever forward may write to it"
    )


class Return(Function):
    result: Any

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return Return.result


@pytest.mark.parametrize(
    ("exported", "returned", "message"),
    [
        ((1, 2), 1, "forward was exported returning a tuple, but returned int"),
        (1, (1,), "forward was exported returning a single value, but returned tuple"),
        ((1, 2), (1, 2, 3), "forward was exported returning 2 values, but returned 3"),
        (
            (torch.ones(2), 3),
            (torch.ones(2), 4),
            "output 1 of forward was exported as the constant 3, but forward returned 4: return what varies "
            "as a tensor",
        ),
        (
            (torch.ones(2), 1),
            (torch.ones(2), True),
            "output 1 of forward was exported as the constant 1, but forward returned True: return what "
            "varies as a tensor",
        ),
        (torch.ones(2), None, "output 0 of forward was exported as a tensor, but forward returned NoneType"),
        (
            torch.ones(2),
            torch.ones(2, dtype=torch.float64),
            "output 0 of forward was exported as a tensor of float32 with 1 dimensions, but forward returned "
            "one of float64 with 1 dimensions",
        ),
        (
            (0, torch.ones(2)),
            (0, torch.ones(2, 1)),
            "output 1 of forward was exported as a tensor of float32 with 1 dimensions, but forward returned "
            "one of float32 with 2 dimensions",
        ),
    ],
)
def test_a_result_other_than_the_exported_is_refused(exported: Any, returned: Any, message: str) -> None:
    Return.result = exported
    site = make_site(Return, data(2))
    Return.result = returned
    error = error_of(run_forward, site, torch.ones(2))
    assert isinstance(error, EngineError)
    assert str(error) == f"{__name__}.Return: {message}"


@pytest.mark.parametrize("constant", [math.nan, (1, "a"), {"a": [1]}], ids=repr)
def test_a_constant_output_may_be_another_object_of_equal_value(constant: object) -> None:
    Return.result = (torch.ones(2), constant)
    site = make_site(Return, data(2))
    Return.result = (torch.ones(2), eval(repr(constant), {"nan": math.nan}))
    assert run_forward(site, torch.ones(2))[0].tolist() == [1.0, 1.0]


class Strided(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.exp().t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.t().exp()[:, ::1].t().t()


def test_strided_outputs_and_gradients_become_contiguous() -> None:
    x = data(2, 3)
    check_against_eager(Strided, x, gradients=[torch.randn(3, 2)])
    site = make_site(Strided, x)
    with InRun(), torch.no_grad():
        from_forward = run_forward(site, x)
        assert from_forward[0].is_contiguous()


class Negated(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.complex(x, x).conj().imag

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.complex(gradient, gradient).conj().imag


@pytest.mark.parametrize("shape", [(), (1, 1), (3,)], ids=str)
def test_lazily_negated_tensors_arrive_negated(shape: tuple[int, ...]) -> None:
    check_against_eager(Negated, data(*shape), gradients=[torch.ones(shape)])


def test_a_wrong_number_of_tensors_is_refused() -> None:
    site = make_site(Record, data(2))
    error = error_of(run_forward, site, torch.ones(2), torch.ones(2))
    assert (
        str(error) == f"{__name__}.Record: forward was given 2 tensors, but its site has 1 tensor arguments"
    )


def test_a_tensor_that_did_not_arrive_is_named() -> None:
    site = make_site(Record, data(2), 5, torch.ones(2))
    error = error_of(native.call_forward, site, [torch.ones(2), None])
    assert isinstance(error, EngineError)
    assert str(error) == f"{__name__}.Record: no tensor arrived for argument 2"


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^item 0 of the tensors is of type int$"):
        native.call_forward(make_site(Record, data(2)), [3])  # type: ignore[list-item]


def test_an_output_without_plain_memory_is_refused() -> None:
    Return.result = torch.ones(2)
    site = make_site(Return, data(2))
    Return.result = torch.ones(2).to_sparse()
    error = error_of(run_forward, site, torch.ones(2))
    assert isinstance(error, EngineError)
    assert str(error) == (
        f"{__name__}.Return: output 0 of forward is a tensor that cannot be handed to ONNX Runtime"
    )
    assert isinstance(error.__cause__, RuntimeError)


@pytest.mark.cuda
def test_an_output_on_another_device_is_refused() -> None:
    Return.result = torch.ones(2)
    site = make_site(Return, data(2))
    Return.result = torch.ones(2, device="cuda")
    error = error_of(run_forward, site, torch.ones(2))
    assert str(error) == (
        f"{__name__}.Return: output 0 of forward is on cuda:0, but its first tensor argument is on cpu"
    )


def test_calls_work_in_inference_mode_and_see_a_requires_grad_as_in_eager() -> None:
    x = data(2, 3)
    site = make_site(Record, x, training=False)
    with torch.inference_mode():
        Record.apply(x)
        eager = Record.seen[1].requires_grad
        for _ in range(3):
            (y,) = native.call_forward(site, [x.detach()])
        assert Record.seen[1].requires_grad is eager
        torch.testing.assert_close(y, x * 1)


def test_calls_are_counted() -> None:
    site = make_site(Record, data(2))
    for _ in range(3):
        run_forward(site, torch.ones(2))
    assert site.calls == 3


def test_sizes_beside_a_zero_need_no_product() -> None:
    """The product of the other sizes overflows 64 bits, which would be undefined behaviour in C++."""

    class CountOf(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.tensor(x.numel())

    x = torch.empty(0, 1).expand(0, 2**62).unsqueeze(2).expand(0, 2**62, 2**62)
    (y,) = native.call_forward(make_site(CountOf, torch.empty(0, 1, 1)), [x])
    assert y == 0
