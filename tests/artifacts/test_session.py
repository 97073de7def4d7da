"""Sessions over the files of a training step."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.numpy import load_file

from torch2ort.artifacts import TrainingSession
from torch2ort.errors import OptionError, SchemaMismatchError


def bits(path):
    return {name: value.tobytes() for name, value in load_file(path).items()}


def test_every_node_is_an_operator_of_onnx(folder):
    files = sorted(folder.glob("*.onnx"))
    assert [path.name for path in files] == [
        "eval_model.onnx",
        "inference_model.onnx",
        "optimizer_model.onnx",
        "train_step.onnx",
        "training_model.onnx",
    ]
    for path in files:
        model = onnx.load(path)
        assert {node.domain for node in model.graph.node} == {""}
        assert not model.functions


def test_it_trains_where_torch_cannot_be_imported(folder):
    script = f"""
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("no torch here")
sys.meta_path.insert(0, NoTorch())
import numpy as np
from torch2ort.artifacts import TrainingSession
session = TrainingSession({str(folder)!r})
batch = np.ones((6, 3), np.float32), np.zeros(6, np.int64)
losses = [session.step(batch)["loss"] for _ in range(20)]
assert losses[-1] < losses[0], losses
session.evaluate(batch)
session.export_for_inference({str(folder / "model.onnx")!r})
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)


def test_importing_the_artifacts_imports_no_torch():
    script = "import sys, torch2ort.artifacts; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)


def test_it_goes_on_from_a_checkpoint_bit_by_bit(folder, batch, tmp_path):
    session = TrainingSession(folder)
    session.seed, session.lr = 7, 0.02
    for _ in range(5):
        session.step(batch)
    session.save_checkpoint(tmp_path / "five")
    other = TrainingSession(folder)
    other.load_checkpoint(tmp_path / "five")
    assert (other.seed, other.lr, other.steps) == (7, 0.02, 5)
    for one in (session, other):
        one.step(batch)
    session.save_checkpoint(tmp_path / "a")
    other.save_checkpoint(tmp_path / "b")
    assert bits(tmp_path / "a") == bits(tmp_path / "b")
    assert bits(tmp_path / "a") != bits(tmp_path / "five")


def test_two_runs_of_one_file_give_the_same_bits(folder, batch, tmp_path):
    for name in "ab":
        session = TrainingSession(folder)
        for _ in range(5):
            session.step(batch)
        session.save_checkpoint(tmp_path / name)
    assert bits(tmp_path / "a") == bits(tmp_path / "b")


def test_its_state_stays_in_two_sets_of_buffers_that_take_turns(folder, batch):
    session = TrainingSession(folder)
    state = session._state

    def places():
        return [{name: value.data_ptr() for name, value in one.items()} for one in state.sets]

    before, turns = places(), []
    for _ in range(4):
        session.step(batch)
        turns.append(state.current)
    assert places() == before
    assert not set(before[0].values()) & set(before[1].values())
    assert turns == [1, 0, 1, 0]


def test_random_operators_draw_by_the_seed_and_the_step(folder, batch):
    def losses(seed):
        session = TrainingSession(folder)
        session.seed, session.lr = seed, 0.0
        return [session.step(batch)["loss"] for _ in range(3)]

    assert losses(1) == losses(1)
    assert len({*losses(1), *losses(2)}) > 3


def test_a_step_gives_loss_and_metrics(folder, batch):
    found = TrainingSession(folder).step(batch)
    assert list(found) == ["loss", "accuracy", "outputs"]
    assert type(found["loss"]) is float
    assert found["outputs"].shape == (6, 2)
    assert found["accuracy"] == pytest.approx(np.mean(found["outputs"].argmax(1) == batch[1]))


def test_a_batch_may_have_another_size_where_it_varies(folder, batch):
    session = TrainingSession(folder)
    assert session.step((np.concatenate([batch[0]] * 2), np.tile(batch[1], 2)))["outputs"].shape == (12, 2)
    assert session.evaluate((batch[0][:2], batch[1][:2]))["outputs"].shape == (2, 2)


def test_evaluation_is_the_models_in_its_mode_and_changes_nothing(folder, batch, model):
    session = TrainingSession(folder)
    first = session.evaluate(batch)
    assert session.evaluate(batch)["loss"] == first["loss"]
    model.eval()
    try:
        with torch.no_grad():
            wanted = model(torch.from_numpy(batch[0]))
    finally:
        model.train()
    np.testing.assert_allclose(first["outputs"], wanted.numpy(), rtol=1e-5, atol=1e-6)
    session.step(batch)
    assert session.evaluate(batch)["loss"] != first["loss"]


def test_the_exported_model_holds_what_was_trained(folder, batch, tmp_path):
    session = TrainingSession(folder)
    for _ in range(3):
        session.step(batch)
    path = tmp_path / "model.onnx"
    session.export_for_inference(path)
    onnx.checker.check_model(onnx.load(path))
    run = onnxruntime.InferenceSession(path)
    assert [value.name for value in run.get_inputs()] == ["x"]
    (found,) = run.run(None, {"x": batch[0]})
    np.testing.assert_allclose(found, session.evaluate(batch)["outputs"], rtol=1e-6)


def test_a_learning_rate_of_zero_trains_no_parameter(folder, batch):
    session = TrainingSession(folder)
    before = session.parameters()
    session.lr = 0.0
    session.step(batch)
    for name, value in session.parameters().items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("value", [-1.0, float("nan"), 1e39, "fast", None, np.ones(2)])
def test_a_learning_rate_that_is_none_is_refused(folder, value):
    session = TrainingSession(folder)
    with pytest.raises(OptionError) as raised:
        session.lr = value
    assert str(raised.value) == f"lr={value!r}: expected a number of float32 that is not negative"
    assert session.lr == 0.01


@pytest.mark.parametrize("value", [1 << 63, 1.5, "7", None])
def test_a_seed_that_a_checkpoint_cannot_hold_is_refused(folder, value):
    session = TrainingSession(folder)
    with pytest.raises(OptionError) as raised:
        session.seed = value
    assert str(raised.value) == f"seed={value!r}: expected an integer of 64 bits"
    assert session.seed == 0


def test_a_provider_that_onnxruntime_lacks_is_refused_and_the_cpu_does_not_take_its_place(folder):
    available = onnxruntime.get_available_providers()
    with pytest.raises(OptionError) as raised:
        TrainingSession(folder, ["CPUExecutionProvider", "AbacusExecutionProvider"])
    assert str(raised.value) == (
        f"providers names 'AbacusExecutionProvider', which is not an execution provider; onnxruntime "
        f"{onnxruntime.__version__} has {', '.join(available)} here"
    )


def test_providers_are_a_list(folder):
    with pytest.raises(OptionError) as raised:
        TrainingSession(folder, "CPUExecutionProvider")
    assert str(raised.value) == (
        "providers is 'CPUExecutionProvider'; expected a list of names or of (name, options) pairs"
    )


def test_threads_that_share_a_session_wait_for_each_other(folder, batch):
    session, alone = TrainingSession(folder), TrainingSession(folder)
    for _ in range(40):
        alone.step(batch)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(session.step, [batch] * 40))
    assert session.steps == 40
    for name, value in session.parameters().items():
        np.testing.assert_array_equal(value, alone.parameters()[name])


def test_a_checkpoint_that_cannot_be_written_is_an_error_of_the_system(folder, tmp_path):
    with pytest.raises(OSError, match="the checkpoint cannot be written"):
        TrainingSession(folder).save_checkpoint(tmp_path / "nowhere" / "now")


X, Y = np.zeros((6, 3), np.float32), np.zeros(6, np.int64)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((X.astype(np.float64), Y), "batch: input 'inputs': expected float32, got float64"),
        (
            (X[:, :2], Y),
            "batch: input 'inputs', dimension 1: expected size 3, got 2; export with dynamic_shapes if this "
            "size varies",
        ),
        (
            (X, Y[:4]),
            "batch: input 'targets', dimension 0: expected size 6, the same as input 'inputs', dimension 0, "
            "got 4; export with a Dim of its own if it varies by itself",
        ),
        (
            (X[:1], Y[:1]),
            "batch: input 'inputs', dimension 0: expected a size (batch) from 2 to 64, got 1; export with "
            "other bounds of that Dim if such sizes occur",
        ),
        ((X,), "batch: expected a tuple of 2, given a tuple of 1"),
        ({"inputs": X}, "batch: expected a tuple of 2, given a dict with ['inputs']"),
        ((X, 3), "batch[1]: expected the numpy array 'targets', given 3"),
        (
            (torch.from_numpy(X.copy()).requires_grad_(), Y),
            "batch[0]: expected the numpy array 'inputs', given a Tensor that NumPy cannot read (Can't call "
            "numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.)",
        ),
    ],
)
def test_another_batch_than_the_samples_is_refused(folder, given, sentence):
    with pytest.raises(SchemaMismatchError) as raised:
        TrainingSession(folder).step(given)
    assert str(raised.value) == sentence
