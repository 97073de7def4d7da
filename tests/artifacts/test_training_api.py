"""Usage in the style of onnxruntime.training.api."""

from __future__ import annotations

import copy

import numpy as np
import onnxruntime
import pytest
import safetensors.numpy

from torch2ort.artifacts import CheckpointState, LinearLRScheduler, Module, Optimizer, TrainingSession
from torch2ort.errors import ModelLoadError, OptionError, SchemaMismatchError


@pytest.fixture
def parts(folder):
    state = CheckpointState.load_checkpoint(folder / "checkpoint.safetensors")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    return state, module, Optimizer(folder / "optimizer_model.onnx", module)


def test_its_steps_are_the_sessions(folder, batch, parts):
    state, module, optimizer = parts
    session = TrainingSession(folder)
    for _ in range(4):
        wanted = session.step(batch)
        loss, *_ = module(*batch)
        optimizer.step()
        module.lazy_reset_grad()
        assert loss == pytest.approx(wanted["loss"], rel=1e-6)
    for name, value in session.parameters().items():
        np.testing.assert_allclose(state.parameters[name], value, rtol=1e-5, atol=1e-6)
    CheckpointState.save_checkpoint(state, folder / "now")
    session.load_checkpoint(folder / "now")
    assert session.steps == 4


def test_gradients_are_summed_until_they_are_reset(batch, parts):
    state, module, optimizer = parts
    twice = copy.deepcopy(batch)
    before = state.parameters["last.weight"].data
    module(*batch)
    first = module.gradients.arrays()
    module(*twice)
    second = module.gradients.arrays()
    assert any(np.abs(second[name]).sum() > 1.5 * np.abs(value).sum() for name, value in first.items())
    np.testing.assert_array_equal(state.parameters["last.weight"], before)
    optimizer.step()
    assert np.abs(state.parameters["last.weight"].data - before).max() > 0
    module.lazy_reset_grad()
    module(*batch)
    third = module.gradients.arrays()
    assert (
        np.abs(third["last.weight_grad.accumulation.buffer"]).sum()
        < 1.5 * np.abs(first["last.weight_grad.accumulation.buffer"]).sum()
    )


def test_buffers_change_with_each_call_and_stay_in_a_step(batch, parts):
    state, module, optimizer = parts
    module(*batch)
    once = state.arrays()["norm.num_batches_tracked"]
    module(*batch)
    optimizer.step()
    assert (once, state.arrays()["norm.num_batches_tracked"]) == (1, 2)


def test_evaluation_is_the_sessions(folder, batch, parts):
    _, module, _ = parts
    loss, *_ = module.eval()(*batch)
    assert loss == TrainingSession(folder).evaluate(batch)["loss"]
    assert module.train().training


def test_the_rate_rises_and_falls(parts):
    _, _, optimizer = parts
    scheduler = LinearLRScheduler(optimizer, 2, 6, 0.4)
    rates = []
    for _ in range(8):
        rates.append(optimizer.get_learning_rate())
        scheduler.step()
    assert rates == pytest.approx([0, 0.2, 0.4, 0.3, 0.2, 0.1, 0, 0])


def test_a_schedule_that_only_rises_is_refused(parts):
    with pytest.raises(OptionError) as raised:
        LinearLRScheduler(parts[2], 6, 6, 0.1)
    assert str(raised.value) == "warmup_step_count=6: expected a number from 0 to below total_step_count=6"


@pytest.mark.parametrize("rate", [-0.1, "fast", 1e39])
def test_a_rate_that_is_none_is_refused(parts, rate):
    with pytest.raises(OptionError) as raised:
        LinearLRScheduler(parts[2], 1, 6, rate)
    assert str(raised.value) == f"initial_lr={rate!r}: expected a number of float32 that is not negative"
    with pytest.raises(OptionError) as raised:
        parts[2].set_learning_rate(rate)
    assert str(raised.value) == f"learning_rate={rate!r}: expected a number of float32 that is not negative"


def test_a_file_in_the_place_of_another_is_refused(folder, parts):
    state, module, _ = parts
    evaluation = folder / "eval_model.onnx"
    with pytest.raises(ModelLoadError) as raised:
        Module(evaluation, state)
    assert str(raised.value) == (
        f"{evaluation}: expected the file that was saved as training_model.onnx, given eval_model.onnx"
    )
    with pytest.raises(ModelLoadError) as raised:
        Optimizer(evaluation, module)
    assert str(raised.value) == (
        f"{evaluation}: expected the file that was saved as optimizer_model.onnx, given eval_model.onnx"
    )


def test_a_parameter_can_be_set(batch, parts):
    state, module, _ = parts
    state.parameters["last.bias"] = np.array([1, 2], np.float32)
    np.testing.assert_array_equal(state.parameters["last.bias"], [1, 2])
    with pytest.raises(SchemaMismatchError) as raised:
        state.parameters["last.bias"] = np.zeros(3, np.float32)
    assert str(raised.value) == (
        "parameter 'last.bias': expected float32 of shape (2), given float32 of shape (3)"
    )
    assert module.get_parameters_size() == 3 * 4 + 4 + 4 + 4 + 4 * 2 + 2


def test_a_parameter_has_the_attributes_that_it_had(folder, batch):
    state = CheckpointState.load_checkpoint(folder / "checkpoint.safetensors")
    parameter = state.parameters["last.bias"]
    assert (parameter.name, parameter.requires_grad, parameter.grad) == ("last.bias", True, None)
    parameter.data = np.array([1, 2], np.float32)
    module = Module(folder / "training_model.onnx", state)
    module(*batch)
    np.testing.assert_array_equal(dict(state.parameters)["last.bias"].data, [1, 2])
    np.testing.assert_array_equal(
        parameter.grad, module.gradients.arrays()["last.bias_grad.accumulation.buffer"]
    )
    assert np.abs(parameter.grad).max() > 0
    with pytest.raises(KeyError, match="Parameter nothing not found"):
        state.parameters["nothing"]


def test_properties_are_kept_in_checkpoints(folder, tmp_path):
    state = CheckpointState.load_checkpoint(folder / "checkpoint.safetensors")
    state.properties["epoch"], state.properties["best"], state.properties["run"] = 3, 0.25, "a"
    CheckpointState.save_checkpoint(state, folder / "now")
    session = TrainingSession(folder)
    session.load_checkpoint(folder / "now")
    session.save_checkpoint(folder / "then")
    found = CheckpointState.load_checkpoint(folder / "then").properties
    assert dict(found) == {"epoch": 3, "best": 0.25, "run": "a"}
    with pytest.raises(OptionError) as raised:
        state.properties["list"] = [1]
    assert str(raised.value) == (
        "properties['list'] = [1]: expected a name, and an integer, a float or a text"
    )


def test_losses_are_arrays_or_native_values_as_the_batch_is(batch, parts):
    _, module, _ = parts
    module.eval()
    losses = module(*batch)
    assert [type(value) for value in losses] == [np.ndarray] * 3
    assert (losses[0].shape, losses[0].dtype) == ((), np.float32)
    native = module(*map(onnxruntime.OrtValue.ortvalue_from_numpy, batch))
    assert [type(value) for value in native] == [onnxruntime.OrtValue] * 3
    np.testing.assert_array_equal(native[0].numpy(), losses[0])
    assert module.input_names() == ["inputs", "targets"]
    assert module.output_names() == ["loss", "accuracy", "outputs"]


def test_parameters_are_copied_as_one_row(folder, batch, parts):
    state, module, _ = parts
    row = module.get_contiguous_parameters()
    assert row.shape() == [module.get_parameters_size()]
    module.copy_buffer_to_parameters(onnxruntime.OrtValue.ortvalue_from_numpy(row.numpy() * 2))
    first = CheckpointState.load_checkpoint(folder / "checkpoint.safetensors")
    for name, parameter in state.parameters:
        np.testing.assert_array_equal(parameter, first.parameters[name].data * 2)
    with pytest.raises(SchemaMismatchError) as raised:
        module.copy_buffer_to_parameters(onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(3, np.float32)))
    assert str(raised.value) == "buffer: expected float32 of shape (34,), given float32 of shape (3,)"


def test_the_model_is_exported_for_inference(batch, parts, tmp_path):
    _, module, _ = parts
    module.export_model_for_inferencing(tmp_path / "model.onnx", ["output"])
    run = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert run.run(None, {"x": batch[0]})[0].shape == (6, 2)
    with pytest.raises(OptionError) as raised:
        module.export_model_for_inferencing(tmp_path / "model.onnx", ["loss"])
    assert str(raised.value) == "graph_output_names=['loss']: expected ['output']"


@pytest.fixture
def elsewhere(folder, batch, tmp_path):
    """A checkpoint after a step, in a folder without the files of its training step, and its parameters."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint.safetensors")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    module(*batch)
    Optimizer(folder / "optimizer_model.onnx", module).step()
    path = tmp_path / "epochs" / "1.safetensors"
    path.parent.mkdir()
    CheckpointState.save_checkpoint(state, path)
    return path, state.parameters["last.weight"].data


def test_a_checkpoint_is_loaded_from_any_folder(folder, batch, elsewhere):
    path, weight = elsewhere
    state = CheckpointState.load_checkpoint(path)
    np.testing.assert_array_equal(state.parameters["last.weight"].data, weight)
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    session = TrainingSession(folder)
    session.load_checkpoint(path)
    assert module.eval()(*batch)[0] == pytest.approx(session.evaluate(batch)["loss"], rel=1e-6)


def test_a_model_is_exported_from_a_checkpoint_of_another_folder(folder, batch, elsewhere, tmp_path):
    state = CheckpointState.load_checkpoint(elsewhere[0])
    module = Module(folder / "training_model.onnx", state)
    module.export_model_for_inferencing(tmp_path / "model.onnx", ["output"])
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert session.run(None, {"x": batch[0]})[0].shape == (6, 2)


def test_the_optimizers_first_state_lies_beside_the_module(folder, elsewhere, tmp_path):
    state = CheckpointState.load_checkpoint(elsewhere[0])
    with pytest.raises(OptionError) as caught:
        CheckpointState.save_checkpoint(state, tmp_path / "fresh", include_optimizer_state=False)
    assert str(caught.value) == (
        f"include_optimizer_state=False: the optimizer's state before the first step is in "
        f"checkpoint.safetensors beside training_model.onnx, and {elsewhere[0].parent} has none. Make a "
        f"Module of the state first, which names that folder"
    )
    Module(folder / "training_model.onnx", state)
    CheckpointState.save_checkpoint(state, tmp_path / "fresh", include_optimizer_state=False)
    fresh = CheckpointState.load_checkpoint(tmp_path / "fresh")
    assert not any(fresh.array(name).any() for name in fresh.description.optimizer)


def test_a_checkpoint_of_another_training_step_does_not_fit_a_module(folder, elsewhere, tmp_path):
    (folder / "training_model.onnx").write_bytes(b"another")
    with pytest.raises(ModelLoadError, match="expected SHA-256"):
        Module(folder / "training_model.onnx", CheckpointState.load_checkpoint(elsewhere[0]))


def test_a_checkpoint_without_a_description_lies_beside_its_own(folder, elsewhere):
    path, _ = elsewhere
    with safetensors.safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del metadata["training_step"]
    safetensors.numpy.save_file(arrays, folder / "older", metadata)
    CheckpointState.load_checkpoint(folder / "older")
    safetensors.numpy.save_file(arrays, path, metadata)
    with pytest.raises(ModelLoadError) as caught:
        CheckpointState.load_checkpoint(path)
    assert str(caught.value) == (
        f"{path.parent / 'training.json'}: cannot be read (No such file or directory); expected a folder "
        f"that TrainingArtifacts.save wrote"
    )
