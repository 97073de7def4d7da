"""ExportedModel.session() and calls, whichever onnxruntime is installed."""

from __future__ import annotations

import threading
import traceback
from typing import ClassVar

import onnxruntime
import pytest
import torch

import torch2ort
from tests.stock.models import Chain, plain_options, run
from tests.support.functions import Constants, Square, scaled


class MineError(Exception):
    pass


class Picky(torch.autograd.Function):
    """Raises the exception object that ``errors`` has for the sum of its input."""

    errors: ClassVar[dict[float, BaseException]] = {}

    @staticmethod
    def forward(ctx, x):
        if type(x) is torch.Tensor and x.device.type == "cpu":
            kept = x * 1
            error = Picky.errors.get(float(x.sum()))
            if error is not None:
                raise error
            return kept
        return x * 1


@pytest.fixture
def picky():
    exported = torch2ort.export(Chain(Picky.apply).eval(), torch.ones(1))
    Picky.errors = {}
    yield exported
    Picky.errors = {}


def frames_of(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize("way", ["call", "run", "run_with_ort_values", "run_with_iobinding"])
def test_an_exception_arrives_as_the_same_object_with_its_traceback(picky, way):
    cause = KeyError("cause")
    error = MineError("mine")
    error.__cause__ = cause
    Picky.errors[500.0] = error
    session = picky.session()
    x = torch.full((1,), 500.0)
    name = session.get_inputs()[0].name
    binding = session.io_binding()
    binding.bind_cpu_input(name, x.numpy())
    binding.bind_output(session.get_outputs()[0].name)
    value = onnxruntime.OrtValue.ortvalue_from_numpy(x.numpy())
    calls = {
        "call": lambda: picky(x),
        "run": lambda: session.run(None, {name: x.numpy()}),
        "run_with_ort_values": lambda: session.run_with_ort_values(None, {name: value}),
        "run_with_iobinding": lambda: session.run_with_iobinding(binding),
    }
    with pytest.raises(MineError) as caught:
        calls[way]()
    assert caught.value is error
    assert error.__cause__ is cause
    assert error.__context__ is None
    assert "forward" in frames_of(error)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt("stop"), SystemExit(3), StopIteration(), MemoryError()], ids=repr
)
def test_exceptions_of_every_kind_come_through(picky, error):
    Picky.errors[7.0] = error
    with pytest.raises(type(error)) as caught:
        picky(torch.full((1,), 7.0))
    assert caught.value is error


def test_an_exception_whose_text_cannot_be_made_comes_through(picky):
    class MuteError(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    Picky.errors[7.0] = error = MuteError()
    with pytest.raises(MuteError) as caught:
        picky(torch.full((1,), 7.0))
    assert caught.value is error


def test_a_text_that_looks_like_a_number_of_ours_is_not_mistaken(picky):
    Picky.errors[7.0] = first = MineError("first")
    with pytest.raises(MineError):
        picky(torch.full((1,), 7.0))
    Picky.errors[8.0] = second = MineError("[torch2ort error 1] [torch2ort error 999999]")
    with pytest.raises(MineError) as caught:
        picky(torch.full((1,), 8.0))
    assert caught.value is second is not first


def test_each_thread_gets_its_own_exception(picky):
    session = picky.session()
    name = session.get_inputs()[0].name
    errors = {float(i): MineError(i) for i in range(2, 6)}
    Picky.errors = dict(errors)
    mixed: list[object] = []

    def work(number: float) -> None:
        for _ in range(25):
            try:
                session.run(None, {name: torch.full((1,), number).numpy()})
            except MineError as error:
                if error is not errors[number]:
                    mixed.append((number, error))
            else:
                mixed.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in errors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mixed == []


def test_the_next_run_after_an_exception_is_right(picky):
    Picky.errors[500.0] = MineError()
    with pytest.raises(MineError):
        picky(torch.full((1,), 500.0))
    assert picky(torch.full((1,), 3.0))[0].item() == 3.0


def test_tensors_in_a_traceback_keep_their_values_after_the_run():
    class Fails(torch.autograd.Function):
        fail = False

        @staticmethod
        def forward(ctx, x):
            view = x[2:]
            if Fails.fail:
                raise MineError
            return view * 1

    class Model(torch.nn.Module):
        def forward(self, x):
            return Fails.apply(x * 2)

    exported = torch2ort.export(Model().eval(), torch.ones(100_000))
    for _ in range(3):
        exported(torch.ones(100_000))
    Fails.fail = True
    with pytest.raises(MineError) as caught:
        exported(torch.full((100_000,), 21.0))
    Fails.fail = False
    for i in range(5):
        exported(torch.full((100_000,), float(i)))
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    held = [
        frame.f_locals["view"]
        for frame in frames
        if frame.f_code.co_name == "forward" and "view" in frame.f_locals
    ]
    assert [bool((view == 42.0).all()) for view in held] == [True]


def test_a_session_is_an_inference_session_and_can_change_its_providers():
    exported = torch2ort.export(Chain(Square.apply).eval(), torch.ones(3))
    session = exported.session()
    assert isinstance(session, onnxruntime.InferenceSession)
    session.set_providers(["CPUExecutionProvider"])
    torch.testing.assert_close(run(session, torch.tensor([1.0, 2.0, 3.0]))[0], torch.tensor([1.0, 4.0, 9.0]))


def test_a_session_takes_the_users_options():
    exported = torch2ort.export(Chain(Square.apply).eval(), torch.ones(3))
    options = plain_options(intra_op_num_threads=2)
    for session in (exported.session(session_options=options), exported.session(session_options=options)):
        assert session.get_session_options().intra_op_num_threads == 2
        torch.testing.assert_close(run(session, torch.full((3,), 3.0))[0], torch.full((3,), 9.0))


def test_sessions_outlive_the_exported_model():
    session = torch2ort.export(Chain(Square.apply).eval(), torch.ones(3)).session()
    torch.testing.assert_close(run(session, torch.full((3,), 3.0))[0], torch.full((3,), 9.0))


def test_sessions_come_and_go_while_others_run():
    exported = torch2ort.export(Chain(Square.apply).eval(), torch.ones(3))
    kept = exported.session()
    wrong: list[object] = []

    def work(number: float) -> None:
        x = torch.full((3,), number)
        for i in range(20):
            results = [run(kept, x)[0], exported(x)[0]]
            if i % 4 == 0:
                results.append(run(exported.session(), x)[0])
            wrong.extend(result for result in results if not torch.equal(result, x * x))

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_classes_of_one_name_stay_apart():
    double, triple = scaled(2.0), scaled(3.0)

    def both(x):
        return double.apply(x), triple.apply(x)

    exported = torch2ort.export(Chain(both).eval(), torch.ones(3))
    doubled, tripled = run(exported.session(), torch.ones(3))
    assert doubled.tolist() == [2.0] * 3
    assert tripled.tolist() == [3.0] * 3


def test_constants_keep_value_and_type():
    exported = torch2ort.export(
        Chain(lambda x: Constants.apply(x, *Constants.EXPECTED)).eval(), torch.ones(3)
    )
    x = torch.randn(3)
    torch.testing.assert_close(exported(x)[0], Constants.apply(x, *Constants.EXPECTED))


def test_a_bfloat16_model_runs():
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            assert x.dtype is torch.bfloat16
            return x + 1

    x = torch.randn(5).bfloat16()
    exported = torch2ort.export(torch.nn.Sequential(Bare(Half)).eval(), x)
    torch.testing.assert_close(exported(x), x + 1)


class Bare(torch.nn.Module):
    """A Function and nothing else."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function.apply(x)


def test_what_varies_at_run_time_is_refused_by_name():
    class Moody(torch.autograd.Function):
        rank = 1

        @staticmethod
        def forward(ctx, x):
            return x * 1 if Moody.rank == 1 else x.reshape(1, -1) * 1

    exported = torch2ort.export(torch.nn.Sequential(Bare(Moody)).eval(), torch.ones(3))
    exported(torch.ones(3))
    Moody.rank = 2
    name = f"{Moody.__module__}.{Moody.__qualname__}"
    with pytest.raises(torch2ort.EngineError) as caught:
        exported(torch.ones(3))
    assert str(caught.value) == (
        f"{name}: output 0 of forward was exported as a tensor of float32 with 1 dimensions, but forward "
        f"returned one of float32 with 2 dimensions"
    )
