"""Ownership of memory: tensors that a Function keeps do not change, and none is copied without need."""

from __future__ import annotations

import gc
import weakref
from typing import ClassVar

import onnxruntime
import pytest
import torch

import torch2ort
from tests.stock.models import Chain, plain_session, registered, run
from tests.support.memory import resident_bytes

SMALL, LARGE = 10, 100_000  # below and above the size from which an output may be passed on as it is
VERSION = tuple(map(int, onnxruntime.__version__.split(".")[:2]))

passes_outputs_on = pytest.mark.skipif(
    VERSION < (1, 23), reason="this onnxruntime gives no way to spare the copy of an output"
)


class Between(torch.nn.Module):
    """A Function whose input and output onnxruntime may overwrite, as it owns both."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return torch.sqrt(self.function.apply(x * 2.0) * 3.0 + 1.0) * 4.0


def eager(function: type[torch.autograd.Function], x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return Between(function)(x)


def exported(function: type[torch.autograd.Function], size: int) -> torch2ort.ExportedModel:
    return torch2ort.export(Between(function).eval(), torch.ones(size))


class KeepsInput(torch.autograd.Function):
    """Keeps its input, a view of it, and an array over its memory."""

    kept: ClassVar[list[object]] = []

    @staticmethod
    def forward(ctx, x):
        if type(x) is torch.Tensor:
            KeepsInput.kept = [x, x[1:], x.view(-1, 2)]
        return x + 1.0


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_an_input_that_the_function_keeps_does_not_change(size):
    model = exported(KeepsInput, size)
    for i in range(4):
        x = torch.full((size,), float(i))
        torch.testing.assert_close(model(x), eager(KeepsInput, x))
        model(x)
        kept = KeepsInput.kept
        model(torch.full((size,), 50.0))
        assert [bool((tensor == 2.0 * i).all()) for tensor in kept] == [True] * 3


class KeepsOutput(torch.autograd.Function):
    """Returns a tensor that it computes once."""

    table: torch.Tensor | None = None

    @staticmethod
    def forward(ctx, x):
        if type(x) is not torch.Tensor:
            return torch.full_like(x, 2.0)
        if KeepsOutput.table is None:
            KeepsOutput.table = torch.full_like(x, 2.0)
        return KeepsOutput.table


class KeepsView(torch.autograd.Function):
    """Keeps a view of its result."""

    views: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx, x):
        y = x + 1.0
        if type(x) is torch.Tensor:
            KeepsView.views = [y[3:]]
        return y


class KeepsStorage(torch.autograd.Function):
    """Keeps the storage of its result, and no tensor."""

    storages: ClassVar[list[torch.UntypedStorage]] = []

    @staticmethod
    def forward(ctx, x):
        y = x + 1.0
        if type(x) is torch.Tensor:
            KeepsStorage.storages = [y.untyped_storage()]
        return y


class KeepsArray(torch.autograd.Function):
    """Returns memory of numpy's."""

    array = None

    @staticmethod
    def forward(ctx, x):
        if type(x) is not torch.Tensor:
            return x + 1.0
        KeepsArray.array = x.numpy() + 1.0
        return torch.from_numpy(KeepsArray.array)


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize(
    ("function", "kept", "expected"),
    [
        (KeepsOutput, lambda: KeepsOutput.table, 2.0),
        (KeepsView, lambda: KeepsView.views[0], 7.0),
        (KeepsStorage, lambda: torch.tensor([]).set_(KeepsStorage.storages[0]), 7.0),
        (KeepsArray, lambda: torch.from_numpy(KeepsArray.array), 7.0),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_output_that_the_function_keeps_does_not_change(function, kept, expected, size):
    model = exported(function, size)
    KeepsOutput.table = None
    x = torch.full((size,), 3.0)
    for _ in range(4):
        torch.testing.assert_close(model(x), eager(function, x))
    KeepsOutput.table = None
    for _ in range(3):
        model(x)
    assert bool((kept() == expected).all())


class Records(torch.autograd.Function):
    """Records the addresses of its tensors."""

    addresses: ClassVar[list[tuple[int, int]]] = []

    @staticmethod
    def forward(ctx, x):
        y = x * 0.5
        if type(x) is torch.Tensor:
            Records.addresses.append((x.data_ptr(), y.data_ptr()))
        return y


@pytest.mark.parametrize(("function", "copies"), [(Records, 0), (KeepsInput, 1)])
def test_an_input_is_copied_only_if_the_function_keeps_it(function, copies):
    session = exported(function, SMALL).session()
    (site,) = session.python_op_callees
    x = torch.ones(SMALL)
    run(session, x)  # a first call works on copies, to see what the Function does with them
    before = site.copied_bytes
    for _ in range(3):
        run(session, x)
    assert site.copied_bytes - before == 3 * copies * x.nbytes


@pytest.mark.skipif((1, 20) <= VERSION < (1, 22), reason="this onnxruntime does not speak DLPack")
def test_the_feeds_reach_the_function_without_a_copy():
    class Model(torch.nn.Module):
        def forward(self, x):
            return Records.apply(x)

    model = torch2ort.export(Model().eval(), torch.ones(LARGE))
    x = torch.ones(LARGE)
    model(x)  # a first call works on copies, to see what the Function does with them
    Records.addresses.clear()
    model(x)
    assert [read for read, _ in Records.addresses] == [x.data_ptr()]


@passes_outputs_on
def test_a_large_output_reaches_the_caller_without_a_copy():
    class Model(torch.nn.Module):
        def forward(self, x):
            return Records.apply(x)

    model = torch2ort.export(Model().eval(), torch.ones(LARGE))
    model(torch.ones(LARGE))
    Records.addresses.clear()
    y = model(torch.ones(LARGE))
    assert [written for _, written in Records.addresses] == [y.data_ptr()]
    assert bool((y == 0.5).all())


@passes_outputs_on
def test_a_large_output_is_the_next_functions_input():
    class Model(torch.nn.Module):
        def forward(self, x):
            return Records.apply(Records.apply(Records.apply(x + 1.0)))

    model = torch2ort.export(Model().eval(), torch.ones(LARGE))
    model(torch.ones(LARGE))
    Records.addresses.clear()
    model(torch.ones(LARGE))
    (_, first), (second_in, second), (third_in, _) = Records.addresses
    assert (second_in, third_in) == (first, second)


@passes_outputs_on
def test_memory_that_was_passed_on_is_freed_with_its_last_holder():
    storages: ClassVar[list[weakref.ref]] = []

    class Tracked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x * 0.5
            if type(x) is torch.Tensor:
                storages.append(weakref.ref(y.untyped_storage()))
            return y

    class Model(torch.nn.Module):
        def forward(self, x):
            return Tracked.apply(Tracked.apply(x))

    model = torch2ort.export(Model().eval(), torch.ones(LARGE))
    model(torch.ones(LARGE))
    storages.clear()
    y = model(torch.ones(LARGE))
    gc.collect()
    inner, outer = storages
    assert inner() is None
    assert outer() is not None
    del model, y
    gc.collect()
    assert outer() is None


@passes_outputs_on
def test_memory_that_is_free_serves_outputs_of_another_size():
    class Model(torch.nn.Module):
        def forward(self, x):
            return x + 1.0, Records.apply(x[:2])

    large, small = torch.ones(1 << 23), torch.ones(1 << 22)
    of_large, of_small = (torch2ort.export(Model().eval(), x) for x in (large, small))
    of_large(large)
    before = resident_bytes()
    _first, _second = of_small(small), of_small(small)
    assert resident_bytes() - before < small.nbytes


def test_results_stay_as_they_are_through_later_calls():
    model = exported(Records, LARGE)
    results = [model(torch.full((LARGE,), float(i))) for i in range(4)]
    for i, result in enumerate(results):
        torch.testing.assert_close(result, eager(Records, torch.full((LARGE,), float(i))))


def test_results_outlive_the_model():
    model = exported(Records, LARGE)
    y = model(torch.ones(LARGE))
    expected = y.clone()
    del model
    gc.collect()
    assert torch.equal(y, expected)


class WritesInput(torch.autograd.Function):
    """Writes into its argument, as ``mark_dirty`` allows."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2.0)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_function_that_writes_into_its_argument_leaves_the_callers_tensor_alone(size):
    def call(x):
        y = x * 1.0
        return WritesInput.apply(y), x + 1.0

    model = torch2ort.export(Chain(call).eval(), torch.ones(size))
    x = torch.full((size,), 3.0)
    for _ in range(3):
        written, other = model(x)
        assert (written[0].item(), other[0].item(), x[0].item()) == (6.0, 4.0, 3.0)


class Aliases(torch.autograd.Function):
    """Every output shares memory with the input or another output."""

    @staticmethod
    def forward(ctx, x):
        y = x + 1.0
        return x, x[1:], y, y[1:], y.view(2, -1), x.expand(2, -1), x.view(2, -1).t()


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_outputs_that_share_memory_come_out_right(size):
    model = torch2ort.export(Chain(Aliases.apply).eval(), torch.arange(float(size)))
    with registered(Aliases):
        session = plain_session(model.proto)
    for i in range(3):
        x = torch.arange(float(size)) + i
        for actual, expected in zip(run(session, x), Aliases.apply(x), strict=True):
            assert torch.equal(actual, expected)


def test_a_plain_session_keeps_what_functions_keep_apart():
    with registered(KeepsInput):
        session = plain_session(exported(KeepsInput, LARGE).proto)
    for i in range(3):
        run(session, torch.full((LARGE,), float(i)))
    kept = KeepsInput.kept
    run(session, torch.full((LARGE,), 9.0))
    assert [bool((tensor == 4.0).all()) for tensor in kept] == [True] * 3


@passes_outputs_on
def test_sizes_that_change_from_call_to_call_come_out_right():
    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.relu(Records.apply(x + 1.0)) - 1.0

    rows = torch.export.Dim("rows")
    model = torch2ort.export(Model().eval(), torch.ones(4, 1000), dynamic_shapes=({0: rows},))
    for count in (4, 200, 3, 1000, 200, 5):
        x = torch.randn(count, 1000)
        torch.testing.assert_close(model(x), torch.relu((x + 1.0) * 0.5) - 1.0)


class RecordsGradients(torch.autograd.Function):
    """Records the addresses of incoming and returned gradients, and keeps the latter on request."""

    addresses: ClassVar[list[tuple[int, int]]] = []
    kept: ClassVar[list[torch.Tensor] | None] = None

    @staticmethod
    def forward(ctx, x):
        return x * 0.5

    @staticmethod
    def backward(ctx, grad):
        result = grad * 0.5
        if type(grad) is torch.Tensor:
            RecordsGradients.addresses.append((grad.data_ptr(), result.data_ptr()))
            if RecordsGradients.kept is not None:
                RecordsGradients.kept.append(result)
        return result


class TwoRecords(torch.nn.Module):
    """Two of them, with a view between that makes them two nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(LARGE))

    def forward(self, x):
        y = RecordsGradients.apply(x * self.weight)
        return RecordsGradients.apply(y.view(2, -1)).sum()


def gradient(module: torch.nn.Module) -> torch.Tensor:
    module.zero_grad()
    module(torch.ones(LARGE)).backward()
    return next(module.parameters()).grad


@passes_outputs_on
def test_a_large_gradient_is_the_next_functions_without_a_copy():
    module = torch2ort.ORTModule(TwoRecords())
    gradient(module)
    RecordsGradients.addresses.clear()
    assert torch.equal(gradient(module), torch.full((LARGE,), 0.25))
    (_, given), (taken, _) = RecordsGradients.addresses
    assert taken == given


def test_a_gradient_that_the_function_keeps_does_not_change(monkeypatch):
    kept = []
    monkeypatch.setattr(RecordsGradients, "kept", kept)
    module = torch2ort.ORTModule(TwoRecords())
    for _ in range(3):
        gradient(module)
    assert len(kept) >= 6
    for result in kept:
        assert result.unique().tolist() in ([0.5], [0.25])
