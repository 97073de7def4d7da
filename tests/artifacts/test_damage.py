"""Files and checkpoints that are damaged, or of another training step."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from torch2ort.artifacts import TrainingSession
from torch2ort.artifacts.read_training_json import digest
from torch2ort.errors import ModelLoadError


def message(folder, path=None):
    session = TrainingSession(folder) if path is not None else None
    with pytest.raises(ModelLoadError) as raised:
        TrainingSession(folder) if session is None else session.load_checkpoint(path)
    return str(raised.value)


def changed(folder, change):
    """A checkpoint beside the first one, whose tensors were changed."""
    tensors = load_file(folder / "checkpoint.safetensors")
    change(tensors)
    save_file(tensors, folder / "other.safetensors")
    return folder / "other.safetensors"


def test_a_missing_tensor_is_named(folder):
    path = changed(folder, lambda tensors: tensors.pop("last.bias"))
    assert message(folder, path) == f"{path}: has no tensor 'last.bias'; expected float32 of shape (2)"


def test_a_tensor_of_another_shape_is_named(folder):
    path = changed(folder, lambda tensors: tensors.update({"last.bias": np.zeros(5, np.float32)}))
    assert message(folder, path) == (
        f"{path}: tensor 'last.bias': expected float32 of shape (2), given float32 of shape (5)"
    )


def test_a_tensor_of_another_type_is_named(folder):
    path = changed(folder, lambda tensors: tensors.update({"norm.running_mean": np.zeros(4)}))
    assert message(folder, path) == (
        f"{path}: tensor 'norm.running_mean': expected float32 of shape (4), given float64 of shape (4)"
    )


def test_a_tensor_of_another_step_is_named(folder):
    path = changed(folder, lambda tensors: tensors.update({"more": np.zeros(4)}))
    assert message(folder, path) == (
        f"{path}: tensor 'more': expected no tensor of that name, given float64 of shape (4,); it is a "
        f"checkpoint of another training step"
    )


def test_a_checkpoint_that_ends_early_is_refused_and_changes_nothing(folder, batch):
    path = folder / "short.safetensors"
    path.write_bytes((folder / "checkpoint.safetensors").read_bytes()[:-8])
    session = TrainingSession(folder)
    before = session.parameters()
    with pytest.raises(ModelLoadError, match="damaged, or not a checkpoint"):
        session.load_checkpoint(path)
    np.testing.assert_array_equal(session.parameters()["last.bias"], before["last.bias"])


def test_a_changed_bit_of_a_checkpoint_is_noticed(folder):
    path = folder / "checkpoint.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert "damaged: tensor" in message(folder)
    assert "was expected to have CRC-32" in message(folder)


def test_a_changed_graph_is_noticed(folder):
    path = folder / "train_step.onnx"
    content = path.read_bytes()
    path.write_bytes(content[:-3])
    assert message(folder) == (
        f"{path}: damaged, or not saved with training.json: expected SHA-256 {digest(content)}, given "
        f"{digest(content[:-3])}. Save the training step again"
    )


def test_a_missing_file_is_named(folder):
    (folder / "train_step.onnx").unlink()
    assert message(folder) == (
        f"{folder / 'train_step.onnx'}: cannot be read (No such file or directory); expected the file that "
        f"was saved with training.json"
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"format": "torch2ort.training", "version": 1})])
def test_a_damaged_description_is_named(folder, text):
    (folder / "training.json").write_text(text)
    assert message(folder).startswith(f"{folder / 'training.json'}: not a description of a training step (")


def test_a_description_of_another_version_is_refused(folder):
    path = folder / "training.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))
    assert message(folder) == f"{path}: expected version 1, given 2; save the files again"


@pytest.mark.parametrize(
    "wrong", [{"crc32": "[]"}, {"seed": str(1 << 70)}, {"learning_rate": "nan"}, {"properties": "3"}]
)
def test_metadata_that_is_damaged_is_refused_and_changes_nothing(folder, wrong):
    session = TrainingSession(folder)
    path = folder / "other.safetensors"
    save_file(load_file(folder / "checkpoint.safetensors"), path, {"step": "3", **wrong})
    with pytest.raises(ModelLoadError, match="damaged: its metadata is not that of a checkpoint"):
        session.load_checkpoint(path)
    assert (session.steps, session.seed, session.lr) == (0, 0, 0.01)
