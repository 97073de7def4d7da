"""Training files that call Functions, with their own backward, in PyTorch."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch.nn import functional as F

import torch2ort
from torch2ort import optim
from torch2ort.artifacts import CheckpointState, Module, Optimizer, TrainingSession
from torch2ort.errors import (
    EngineError,
    ExportError,
    FunctionNotFoundError,
    ModelLoadError,
    OptionError,
    Torch2OrtWarning,
)


class Scaled(torch.autograd.Function):
    """``factor * x * weight``, whose second gradient is doubled, so that only its own backward gives it."""

    @staticmethod
    def forward(ctx, x, weight, factor):
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return factor * x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return ctx.factor * grad * weight, 2 * ctx.factor * (grad * x).sum(0), None


class Noise(torch.autograd.Function):
    """Adds random numbers of PyTorch."""

    @staticmethod
    def forward(ctx, x):
        return x + torch.randn_like(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.clone()


class Moody(torch.autograd.Function):
    """Raises an error, or omits a gradient, according to a flag."""

    raises, leaves_out = None, False

    @staticmethod
    def forward(ctx, x):
        if Moody.raises is not None:
            raise Moody.raises
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None if Moody.leaves_out else grad.clone()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.weight = torch.nn.Parameter(torch.randn(4))
        self.last = torch.nn.Linear(4, 2)

    def forward(self, x):
        x = Scaled.apply(torch.tanh(self.first(x)), self.weight, 0.75)
        return Moody.apply(self.last(Scaled.apply(x, self.weight, 1.5)))


class Noisy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x):
        return Noise.apply(self.layer(x)).square().sum()


CLASSES = [Scaled, Moody]


def name(function):
    return f"{function.__module__}.{function.__qualname__}"


def batch(step=0):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, 3, generator=generator), torch.randint(0, 2, (5,), generator=generator)


def arrays(step=0):
    return tuple(one.numpy() for one in batch(step))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, the warnings of its export, and the folder of its step."""
    folder = tmp_path_factory.mktemp("functions")
    torch.manual_seed(3)
    model, optimizer = Net(), optim.SGD(lr=0.1, momentum=0.9)
    with pytest.warns(Torch2OrtWarning) as caught:
        artifacts = torch2ort.export_training(model, batch(), loss=F.cross_entropy, optimizer=optimizer)
    artifacts.save(folder)
    return model, [str(one.message) for one in caught], folder


def test_its_losses_and_parameters_are_those_of_eager_pytorch(made):
    model, _, folder = made
    eager, session = copy.deepcopy(model), TrainingSession(folder, functions=CLASSES)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1, momentum=0.9)
    for step in range(10):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(eager(x), y)
        loss.backward()
        optimizer.step()
        assert session.step(arrays(step))["loss"] == pytest.approx(loss.item(), rel=1e-4)
    for key, value in session.parameters().items():
        np.testing.assert_allclose(value, eager.state_dict()[key], rtol=1e-4, atol=1e-5)
    x, y = batch(99)
    assert session.evaluate(arrays(99))["loss"] == pytest.approx(
        F.cross_entropy(eager(x), y).item(), rel=1e-4
    )


def test_registered_classes_serve_the_habit_of_the_training_api_and_an_exported_model(made, tmp_path):
    folder = made[2]
    for function in CLASSES:
        torch2ort.register_function(function)
    try:
        state = CheckpointState.load_checkpoint(folder / "checkpoint.safetensors")
        module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
        optimizer = Optimizer(folder / "optimizer_model.onnx", module)
        session = TrainingSession(folder)
        for step in range(3):
            wanted = session.step(arrays(step))["loss"]
            assert module(*arrays(step)) == pytest.approx(wanted, rel=1e-6)
            optimizer.step()
            module.lazy_reset_grad()
        session.export_for_inference(tmp_path / "model.onnx")
        settings = onnxruntime.SessionOptions()
        settings.register_custom_ops_library(torch2ort.custom_ops_library_path())
        run = onnxruntime.InferenceSession(tmp_path / "model.onnx", settings)
        (found,) = run.run(None, {"x": arrays()[0]})
        loss = session.evaluate(arrays())["loss"]
    finally:
        for function in CLASSES:
            torch2ort.unregister(function)
    assert F.cross_entropy(torch.from_numpy(found), batch()[1]).item() == pytest.approx(loss, rel=1e-5)


def test_what_is_not_mapped_is_said_at_the_export_and_in_the_description(made):
    _, (said,), folder = made
    names = [name(Moody), name(Scaled)]
    assert said == (
        f"the training step calls {', '.join(names)}, which no exporter maps to ONNX operators: its files "
        f"run only beside PyTorch and torch2ort's custom-op library. Map it with "
        f"torch2ort.register_exporter, and its gradient with torch2ort.register_gradient"
    )
    assert json.loads((folder / "training.json").read_text())["functions"] == names


def test_a_backward_runs_behind_its_forward_though_it_reads_nothing_of_it(tmp_path):
    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))

        def forward(self, x):
            return Scaled.apply(x, self.weight, 2.0).sum()

    # The gradient of a sum is ones, whatever forward gave.
    with pytest.warns(Torch2OrtWarning):
        artifacts = torch2ort.export_training(Sum(), torch.ones(3, 2), optimizer=optim.SGD(lr=0.1))
    artifacts.save(tmp_path)
    session = TrainingSession(tmp_path, functions=[Scaled])
    assert session.step(np.ones((3, 2), np.float32))["loss"] == 18
    np.testing.assert_allclose(session.parameters()["weight"], [1 - 0.1 * 12, 2 - 0.1 * 12], rtol=1e-6)


def test_what_a_function_draws_is_drawn_by_the_seed_and_goes_on_from_a_checkpoint(tmp_path):
    with pytest.warns(Torch2OrtWarning):
        torch2ort.export_training(Noisy(), torch.ones(2, 3)).save(tmp_path)
    state, x = torch.get_rng_state(), np.ones((2, 3), np.float32)

    def losses(seed):
        session = TrainingSession(tmp_path, functions=[Noise])
        session.seed = seed
        found = [session.step(x)["loss"] for _ in range(2)]
        session.save_checkpoint(tmp_path / "two")
        other = TrainingSession(tmp_path, functions=[Noise])
        other.load_checkpoint(tmp_path / "two")
        assert other.step(x)["loss"] == session.step(x)["loss"]
        return found

    assert losses(5) == losses(5)
    assert len({*losses(5), *losses(6)}) == 4
    assert torch.equal(torch.get_rng_state(), state)


def test_an_exception_arrives_as_it_is_and_changes_nothing(made):
    session = TrainingSession(made[2], functions=CLASSES)
    before, Moody.raises = session.parameters(), ValueError("not today")
    try:
        with pytest.raises(ValueError, match="not today") as raised:
            session.step(arrays())
        assert raised.value is Moody.raises
    finally:
        Moody.raises = None
    np.testing.assert_array_equal(session.parameters()["weight"], before["weight"])
    assert session.steps == 0


def test_a_gradient_that_is_left_out_is_refused(made):
    folder = made[2]
    session = TrainingSession(folder, functions=CLASSES)
    Moody.leaves_out = True
    try:
        with pytest.raises(EngineError) as raised:
            session.step(arrays())
    finally:
        Moody.leaves_out = False
    assert str(raised.value) == (
        f"{folder / 'train_step.onnx'}: {name(Moody)}.backward left out the gradient of argument 0, which "
        f"needs one. Eager PyTorch does not update a parameter without a gradient; a file updates it with "
        f"zeros: return torch.zeros_like of the argument if that is what you want"
    )
    assert session.steps == 0


def test_classes_that_were_not_supplied_are_named(made):
    folder = made[2]
    with pytest.raises(FunctionNotFoundError) as raised:
        TrainingSession(folder, functions=[Scaled])
    assert str(raised.value) == (
        f"{folder / 'train_step.onnx'}: the training step calls {name(Moody)}, and no class of that name was "
        f"supplied. Pass it to TrainingSession(folder, functions=[...]), or register it with "
        f"torch2ort.register_function"
    )


def test_where_torch_is_missing_the_error_says_so(made):
    folder = made[2]
    script = f"""
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("no torch here")
sys.meta_path.insert(0, NoTorch())
from torch2ort.artifacts import TrainingSession
from torch2ort.errors import ModelLoadError
try:
    TrainingSession({str(folder)!r})
except ModelLoadError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert found.stdout.strip() == (
        f"{folder / 'train_step.onnx'}: the training step calls {name(Moody)}, {name(Scaled)}, Python code "
        f"that runs in PyTorch, which cannot be imported here (no torch here). pip install torch, or export "
        f"the step again with the Functions mapped to ONNX operators (torch2ort.register_exporter) and their "
        f"gradients (torch2ort.register_gradient)"
    ), found.stderr


def test_nodes_on_several_threads_are_refused(made):
    settings = onnxruntime.SessionOptions()
    settings.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    with pytest.raises(OptionError) as raised:
        TrainingSession(made[2], session_options=settings, functions=CLASSES)
    assert str(raised.value) == (
        "session_options.execution_mode=ExecutionMode.ORT_PARALLEL: expected ORT_SEQUENTIAL, as the training "
        "step calls Functions, whose contexts belong to the thread of the step"
    )


def test_a_backward_without_its_forward_is_refused(made, tmp_path):
    from torch2ort.artifacts.python_op_runner import FunctionRuns

    model = onnx.load(made[2] / "train_step.onnx")
    (node, *_) = [node for node in model.graph.node if node.op_type == "PythonOpGrad"]
    next(a for a in node.attribute if a.name == "forward_node").s = b"another"
    with pytest.raises(ModelLoadError) as raised:
        FunctionRuns(model.SerializeToString(), "train_step.onnx", CLASSES, lambda: (0, 0), None)
    assert str(raised.value) == (
        f"train_step.onnx: the node '{node.name}' runs the backward of 'another', expected one of "
        f"['PythonOp_0', 'PythonOp_1', 'PythonOp_2']; export the training step again"
    )


class WithObject(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, held):
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        return grad.expand(2, 3), None


class Held(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.held = torch.nn.Parameter(torch.ones(3)), slice

    def forward(self, x):
        return WithObject.apply(x * self.weight, self.held)


def test_an_argument_that_no_file_holds_is_refused_at_the_export():
    with pytest.raises(ExportError) as raised:
        torch2ort.export_training(Held(), torch.randn(2, 3))
    assert str(raised.value) == (
        f"{name(WithObject)}: argument 1 is an object of type type, which a file cannot hold; pass numbers, "
        f"strings, None, dtypes or tuples, lists and dicts of them instead"
    )
