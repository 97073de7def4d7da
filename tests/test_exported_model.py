"""Calling, saving and loading an exported model."""

from __future__ import annotations

import collections
import copy
import gc
import re
import sys
import traceback

import onnx
import pytest
import torch

import torch2ort
from tests.support.functions import Affine, Constants, Square, TwoOutputs
from tests.support.memory import resident_bytes
from torch2ort.symbolics.backward_decompositions import LARGE

Pair = collections.namedtuple("Pair", "left right")


class Nested(torch.nn.Module):
    """Nested in, nested out, with constants on either side."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x, extra=None, *, flag=True):
        y = Square.apply(self.layer(x))
        if extra is not None:
            y = y + extra["a"][0]
        return {"y": y if flag else -y, "pair": Pair(y.sum(), [None, "text", 3])}


@pytest.fixture
def exported():
    return torch2ort.export(Nested().eval(), torch.randn(2, 4))


def check_nested(actual, expected):
    assert list(actual) == ["y", "pair"]
    assert type(actual["pair"]) is Pair
    assert actual["pair"].right == [None, "text", 3]
    torch.testing.assert_close(actual["y"], expected["y"])
    torch.testing.assert_close(actual["pair"].left, expected["pair"].left)


def test_a_call_gives_the_models_own_output_structure():
    model, x = Nested(), torch.randn(2, 4)
    extra = {"a": (torch.randn(4),)}
    exported = torch2ort.export(model, (x, extra))
    check_nested(exported(x, extra), model(x, extra))
    check_nested(exported(x=x, extra=extra), model(x, extra))


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (
            (torch.zeros(2, 4, dtype=torch.float64),),
            {},
            r"expected a float32 tensor of rank 2, got float64 of rank 2",
        ),
        ((torch.zeros(4),), {}, r"expected a float32 tensor of rank 2, got float32 of rank 1"),
        ((torch.zeros(3, 4),), {}, r"input 'x', dimension 0: expected size 2, got 3"),
        ((torch.zeros(2, 4),), {"flag": False}, r"\['flag'\]: expected the bool True, got the bool False"),
        ((torch.zeros(2, 4), [1]), {}, r"\['extra'\]: expected None, got"),
    ],
)
def test_another_call_is_refused_with_path_expected_and_given(exported, args, kwargs, message):
    with pytest.raises(torch2ort.SchemaMismatchError, match=message):
        exported(*args, **kwargs)


@pytest.mark.parametrize(
    "other", [torch.zeros(2, 4, dtype=torch.float64), torch.zeros(4, 2), torch.zeros(8)], ids=str
)
def test_another_call_is_refused_after_one_that_fits(exported, other):
    exported(torch.zeros(2, 4))
    with pytest.raises(torch2ort.SchemaMismatchError):
        exported(other)


def test_a_default_that_changes_is_refused_after_a_call_that_fits():
    class Scaled(torch.nn.Module):
        def forward(self, x, scales=[2.0]):  # noqa: B006 - the default is what changes
            return x * scales[0]

    model, x = Scaled(), torch.ones(2)
    exported = torch2ort.export(model, x)
    exported(x)
    Scaled.forward.__defaults__[0][0] = 3.0
    with pytest.raises(torch2ort.SchemaMismatchError, match=re.escape("['scales'][0]: expected")):
        exported(x)


def test_a_size_that_breaks_a_condition_of_the_trace_is_refused():
    class Halves(torch.nn.Module):
        def forward(self, x):
            return x.reshape(x.shape[0] // 2, 2).sum(1)

    exported = torch2ort.export(Halves(), torch.randn(6), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    assert exported(torch.randn(8)).shape == (4,)
    with pytest.raises(torch2ort.SchemaMismatchError):
        exported(torch.randn(7))


class Everything(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 8)
        self.weight = torch.nn.Parameter(torch.rand(8))

    def forward(self, x):
        hidden = Affine.apply(self.layer(x), self.weight)
        doubled, summed = TwoOutputs.apply(Constants.apply(hidden, *Constants.EXPECTED))
        return doubled + summed


FUNCTIONS = [Affine, Constants, TwoOutputs]


def test_a_saved_model_loads_and_gives_the_same(tmp_path):
    model, x = Everything(), torch.randn(3, 6)
    exported = torch2ort.export(model, x)
    exported.save(tmp_path / "model.onnx")
    loaded = torch2ort.load(tmp_path / "model.onnx", functions=FUNCTIONS)
    torch.testing.assert_close(loaded(x), model(x))
    assert loaded.python_ops == exported.python_ops
    assert loaded.training == exported.training
    assert loaded.input_schema == exported.input_schema
    assert loaded.output_schema == exported.output_schema
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_a_saved_training_graph_may_call_pytorchs_kernels(tmp_path):
    """Operators on large tensors, and their derivatives, run in these kernels."""
    x = torch.randn(64, LARGE // 64, requires_grad=True)
    exported = torch2ort.export(torch.nn.GELU(), x, training=True)
    exported.save(tmp_path / "model.onnx")
    torch.testing.assert_close(torch2ort.load(tmp_path / "model.onnx")(x), torch.nn.functional.gelu(x))


def test_registered_functions_need_not_be_given(tmp_path):
    exported = torch2ort.export(Nested(), torch.randn(2, 4))
    exported.save(tmp_path / "model.onnx")
    torch2ort.register_function(Square)
    try:
        loaded = torch2ort.load(tmp_path / "model.onnx")
        assert loaded.python_ops[0].function is Square
    finally:
        torch2ort.unregister(Square)


def test_missing_functions_are_all_named(tmp_path):
    torch2ort.export(Everything(), torch.randn(3, 6)).save(tmp_path / "model.onnx")
    with pytest.raises(torch2ort.FunctionNotFoundError) as caught:
        torch2ort.load(tmp_path / "model.onnx", functions=[Affine])
    assert str(caught.value) == (
        "the model calls 2 Function(s) that were not supplied: tests.support.functions.Constants, "
        "tests.support.functions.TwoOutputs. "
        "Pass the classes to torch2ort.load(path, functions=[...]) or register them with "
        "torch2ort.register_function"
    )


@pytest.mark.parametrize("given", [Square, "tests.support.functions.Square", [Square.apply], [None]])
def test_what_is_no_list_of_classes_is_refused(given, tmp_path):
    torch2ort.export(Nested(), torch.randn(2, 4)).save(tmp_path / "model.onnx")
    with pytest.raises(torch2ort.RegistryError) as caught:
        torch2ort.load(tmp_path / "model.onnx", functions=given)
    assert str(caught.value) == (
        f"functions={given!r}: expected a list of subclasses of torch.autograd.Function; pass the classes "
        f"themselves, as in functions=[MyFunction]"
    )


def test_a_model_goes_into_a_file_and_no_folder(tmp_path):
    exported = torch2ort.export(Nested(), torch.randn(2, 4))
    with pytest.raises(IsADirectoryError) as caught:
        exported.save(tmp_path)
    assert str(caught.value) == f"{tmp_path} is a folder; give the path of a file, as {tmp_path}/model.onnx"
    with pytest.raises(FileNotFoundError) as missing:
        exported.save(tmp_path / "new" / "model.onnx")
    assert str(missing.value) == (
        f"{tmp_path}/new/model.onnx: there is no folder {tmp_path}/new; make it first"
    )
    with pytest.raises(torch2ort.ModelLoadError) as loaded:
        torch2ort.load(tmp_path)
    assert str(loaded.value) == f"{tmp_path} is a folder; give the path of the .onnx file"


def test_an_object_argument_cannot_be_saved(tmp_path):
    class WithObject(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, thing):
            return x * thing.factor

    class Thing:
        factor = 2.0

    class Model(torch.nn.Module):
        def forward(self, x):
            return WithObject.apply(x, Thing())

    exported = torch2ort.export(Model(), torch.ones(2))
    torch.testing.assert_close(exported(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(
        torch2ort.ExportError, match=r"WithObject: argument 1 is an object of type .*Thing, which a file"
    ):
        exported.save(tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"no model", bytes(range(256))])
def test_a_damaged_file_is_refused_with_its_path(tmp_path, content):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(torch2ort.ModelLoadError, match=r"model\.onnx"):
        torch2ort.load(path)


def test_a_foreign_onnx_model_is_refused(tmp_path):
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    out = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Neg", ["x"], ["y"])], "g", [value], [out])
    onnx.save(onnx.helper.make_model(graph, ir_version=10), tmp_path / "model.onnx")
    with pytest.raises(torch2ort.ModelLoadError, match="not one that torch2ort saved"):
        torch2ort.load(tmp_path / "model.onnx")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(torch2ort.ModelLoadError, match="there is no such file"):
        torch2ort.load(tmp_path / "model.onnx")


def test_a_session_runs_the_python_ops(exported):
    x = torch.randn(2, 4)
    names = [value.name for value in exported.proto.graph.output]
    values = exported.session().run(names, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(values[0]), exported(x)["y"])


def test_the_exported_weights_are_those_of_the_export():
    model, x = torch.nn.Linear(3, 2), torch.randn(1, 3)
    exported = torch2ort.export(model, x)
    before = model(x).detach().clone()
    with torch.no_grad():
        model.weight.add_(1)
    torch.testing.assert_close(exported(x), before)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of this process as Linux gives it")
def test_a_call_holds_no_serialised_copy_of_the_weights():
    model = torch.nn.Linear(4096, 8192).eval()
    exported = torch2ort.export(model, torch.ones(1, 4096))
    gc.collect()
    before = resident_bytes()
    exported(torch.ones(1, 4096))
    gc.collect()
    # ONNX Runtime's own copy, and in a training build another that is packed for its kernels.
    assert resident_bytes() - before < 2.5 * model.weight.numel() * 4


def test_training_mode_is_exported_on_demand():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).eval()
    x = torch.randn(64, 4)
    trained = torch2ort.export(model, x, training=True)
    assert trained.training
    assert not model.training
    assert (trained(x) == 0).float().mean() > 0.2
    assert (torch2ort.export(model, x)(x) == 0).float().mean() < 0.1


def test_an_exception_in_forward_arrives_as_the_same_object():
    error = ValueError("mine")

    class Picky(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if type(x) is torch.Tensor and x.numel() and float(x.sum()) > 100:
                raise error
            return x * 1

    class Model(torch.nn.Module):
        def forward(self, x):
            return Picky.apply(x)

    exported = torch2ort.export(Model(), torch.ones(2))
    exported(torch.ones(2))
    with pytest.raises(ValueError, match="mine") as caught:
        exported(torch.full((2,), 1e6))
    assert caught.value is error
    assert any(
        frame.name == "forward" and "raise error" in (frame.line or "")
        for frame in traceback.extract_tb(caught.value.__traceback__)
    )


class Stateful(torch.nn.Module):
    """An average over its calls, and their number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.average.mul_(0.5).add_(x.mean(0))
        self.calls += 1
        return Square.apply(self.layer(x)) + self.average, self.calls * 1


def assert_goes_on_like(called, model, x, times=2):
    for _ in range(times):
        for actual, expected in zip(called(x), model(x), strict=True):
            torch.testing.assert_close(actual, expected.detach())


def test_a_call_starts_from_the_state_that_the_last_one_left(tmp_path):
    model, x = Stateful(), torch.randn(2, 3)
    exported = torch2ort.export(model, x)
    assert model.calls == 0
    eager = copy.deepcopy(model)
    assert_goes_on_like(exported, eager, x)
    exported.save(tmp_path / "model.onnx")
    loaded = torch2ort.load(tmp_path / "model.onnx", functions=[Square])
    # The file holds the state as it was when it was saved.
    assert_goes_on_like(loaded, copy.deepcopy(eager), x)
    assert_goes_on_like(exported, eager, x)
    assert model.calls == 0


def test_a_plain_session_takes_and_gives_the_state():
    model, x = Stateful(), torch.randn(2, 3)
    exported = torch2ort.export(model, x)
    session = exported.session()
    assert [value.name for value in session.get_inputs()] == ["x"]
    names = [value.name for value in session.get_outputs()]
    given = {"x": x.numpy()}
    for _ in range(3):
        result = dict(zip(names, session.run(None, given), strict=True))
        torch.testing.assert_close(torch.from_numpy(result[names[0]]), model(x)[0].detach())
        given.update(zip(("average", "calls"), (result[n] for n in names[2:]), strict=True))


def test_damaged_names_of_state_are_refused(tmp_path):
    exported = torch2ort.export(Stateful(), torch.randn(2, 3))
    exported.save(tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    for entry in model.metadata_props:
        entry.value = entry.value.replace('"state": {"average"', '"state": {"other"')
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(torch2ort.ModelLoadError, match="its torch2ort metadata is damaged"):
        torch2ort.load(tmp_path / "model.onnx", functions=[Square])
