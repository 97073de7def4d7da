"""A trainer's state: its layout, its loading, checkpoints, and bit-exact resumption."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.models import Net, batches, started, trainer
from torch2ort.errors import TrainerError
from torch2ort.trainer import ORTTrainer, amp, optim


def run(tried: ORTTrainer, first: int, last: int) -> list[torch.Tensor]:
    """The losses of some of six steps."""
    return [tried.train_step(x, y)[0] for x, y in list(batches(6))[first:last]]


@pytest.fixture(scope="module")
def trained() -> ORTTrainer:
    tried = trainer(started(), optim.AdamConfig(lr=0.05))
    run(tried, 0, 3)
    return tried


def test_a_state_has_the_documented_layout(trained: ORTTrainer) -> None:
    found = trained.state_dict()
    names = {name for name, _ in started().named_parameters()}
    assert set(found) == {"model", "optimizer", "trainer_options", "train_step_info"}
    assert set(found["model"]) == {"full_precision"}
    assert found["model"]["full_precision"].keys() == names == found["optimizer"].keys()
    moments = found["optimizer"]["last.bias"]
    assert {name: value.shape for name, value in moments.items()} == {
        "Moment_1": (3,), "Moment_2": (3,), "Update_Count": (1,),
    }  # fmt: skip
    assert moments["Update_Count"].item() == 3
    assert found["trainer_options"] == {
        "mixed_precision": False, "zero_stage": 0, "world_rank": 0, "world_size": 1,
        "optimizer_name": "AdamOptimizer", "data_parallel_size": 1, "horizontal_parallel_size": 1,
    }  # fmt: skip
    assert found["train_step_info"] == {"optimization_step": 3, "step": 3}


def test_lamb_s_state_shares_its_count() -> None:
    tried = trainer(started(), optim.LambConfig())
    run(tried, 0, 2)
    found = tried.state_dict()["optimizer"]
    assert found["shared_optimizer_state"]["step"].tolist() == [2]
    assert set(found["last.bias"]) == {"Moment_1", "Moment_2"}


def test_sgd_has_no_state() -> None:
    assert trainer().state_dict()["optimizer"] == {}


def test_a_state_is_a_copy(trained: ORTTrainer) -> None:
    trained.state_dict()["model"]["full_precision"]["last.bias"][:] = 100
    assert trained.state_dict()["model"]["full_precision"]["last.bias"].max() < 100


def test_a_state_in_pytorch_s_format_is_the_model_s() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    model.forward = type(model).forward.__get__(model)
    named = ORTTrainer(
        model, {"inputs": [("input", [2, 4]), ("label", [2])], "outputs": [("loss", [], True)]},
        optim.SGDConfig(), torch.nn.functional.cross_entropy,
    )  # fmt: skip
    found = named.state_dict(pytorch_format=True)
    torch.testing.assert_close(found, dict(model.state_dict()))
    assert found["0.weight"] is not model[0].weight


CONFIGS = [
    (optim.SGDConfig(lr=0.1), {}),
    (optim.AdamConfig(lr=0.05), {"batch": {"gradient_accumulation_steps": 2}}),
    (
        optim.LambConfig(lr=0.05),
        {"lr_scheduler": optim.lr_scheduler.CosineWarmupLRScheduler(6), "mixed_precision": {"enabled": True}},
    ),
]


@pytest.mark.parametrize(("config", "groups"), CONFIGS, ids=["sgd", "adam", "lamb"])
def test_a_resumed_training_has_the_same_bits(config: Any, groups: dict[str, Any], tmp_path: Path) -> None:
    whole = trainer(started(), config, **groups)
    losses = run(whole, 0, 3)
    whole.save_checkpoint(str(tmp_path / "state"), {"epoch": 1, "mean": np.arange(2.0), "seen": [1, (2,)]})
    losses += run(whole, 3, 6)
    other = trainer(Net(), config, **groups)
    user = other.load_checkpoint(str(tmp_path / "state"))
    assert (user["epoch"], user["mean"].tolist(), user["seen"]) == (1, [0.0, 1.0], [1, (2,)])
    assert all(map(torch.equal, run(other, 3, 6), losses[3:]))
    ours, theirs = other.state_dict(pytorch_format=True), whole.state_dict(pytorch_format=True)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_loss_scale_is_resumed() -> None:
    one = trainer(mixed_precision={"enabled": True, "loss_scaler": amp.DynamicLossScaler(loss_scale=32.0)})
    other = trainer(mixed_precision={"enabled": True})
    other.load_state_dict(one.state_dict())
    assert other._scaler.loss_scale == 32.0


def test_a_checkpoint_may_be_a_file_object(trained: ORTTrainer) -> None:
    file = io.BytesIO()
    trained.save_checkpoint(file)
    file.seek(0)
    other = trainer(Net(), optim.AdamConfig(lr=0.05))
    assert other.load_checkpoint(file) == {}
    assert torch.equal(other._whole.model.last.bias, trained._whole.model.last.bias)


def test_a_checkpoint_without_the_optimizer_s_state_leaves_that_as_it_is(
    trained: ORTTrainer, tmp_path: Path
) -> None:
    trained.save_checkpoint(tmp_path / "weights", include_optimizer_states=False)
    other = trainer(Net(), optim.AdamConfig(lr=0.05))
    other.load_checkpoint(tmp_path / "weights")
    found = other.state_dict()
    assert found["optimizer"]["last.bias"]["Update_Count"].item() == 0
    expected = trained.state_dict()["model"]["full_precision"]
    np.testing.assert_equal(found["model"]["full_precision"], expected)


def test_a_checkpoint_replaces_no_file(trained: ORTTrainer, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("mine")
    with pytest.raises(FileExistsError):
        trained.save_checkpoint(tmp_path / "state")
    assert (tmp_path / "state").read_text() == "mine"


def test_a_checkpoint_holds_plain_values(trained: ORTTrainer, tmp_path: Path) -> None:
    with pytest.raises(TrainerError) as caught:
        trained.save_checkpoint(tmp_path / "state", {"a": [object()]})
    assert str(caught.value) == (
        "user_dict['a'][0] is a object; a checkpoint holds tensors, arrays of numbers, numbers, texts, and "
        "dicts, lists and tuples of them"
    )
    assert not (tmp_path / "state").exists()


def test_a_file_that_is_no_checkpoint_is_refused(trained: ORTTrainer, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    torch.save({"weight": torch.ones(1)}, tmp_path / "other")
    with pytest.raises(TrainerError, match="text: no checkpoint of a trainer, or damaged"):
        trained.load_checkpoint(tmp_path / "text")
    with pytest.raises(
        TrainerError, match=r"other: expected a checkpoint that ORTTrainer\.save_checkpoint wrote"
    ):
        trained.load_checkpoint(tmp_path / "other")


def _without(key: str) -> Any:
    def change(state: dict[str, Any]) -> None:
        del state[key]

    return change


def _of_another_shape(state: dict[str, Any]) -> None:
    state["model"]["full_precision"]["last.bias"] = np.zeros(5, np.float32)


def _with_another_weight(state: dict[str, Any]) -> None:
    state["model"]["full_precision"]["more"] = state["model"]["full_precision"].pop("last.bias")


def _without_a_moment(state: dict[str, Any]) -> None:
    del state["optimizer"]["last.bias"]["Moment_2"]


def _of_another_optimizer(state: dict[str, Any]) -> None:
    state["trainer_options"]["optimizer_name"] = "LambOptimizer"


def _counting(steps: Any) -> Any:
    def change(state: dict[str, Any]) -> None:
        state["train_step_info"]["step"] = steps

    return change


def _with_a_text(state: dict[str, Any]) -> None:
    state["model"]["full_precision"]["last.bias"] = "zeros"


def _without_a_dict(state: dict[str, Any]) -> None:
    state["optimizer"] = 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _without("model"),
            "The state has ['optimizer', 'train_step_info', 'trainer_options']; expected what "
            "ORTTrainer.state_dict() returns, with 'model'.",
        ),
        (
            _of_another_shape,
            "The weight 'last.bias' has shape [5]; this trainer's has [3]. Load the state of the same model.",
        ),
        (
            _with_another_weight,
            "The state's weights does not fit this trainer's: missing are ['last.bias'], unexpected "
            "['more']. "
            "Load the state of the same model, or pass strict=False.",
        ),
        (
            _without_a_moment,
            "The state has no optimizer state Moment_2 of 'last.bias'; give a whole one.",
        ),
        (_counting("many"), "The state's train_step_info.step is 'many'; expected an integer of at least 0."),
        (
            _with_a_text,
            "The weight 'last.bias' is a str; expected an array of numbers. Load the state of the same "
            "model.",
        ),
        (
            _without_a_dict,
            "The state's optimizer is a int; expected a dict, as ORTTrainer.state_dict() returns it.",
        ),
        (_of_another_optimizer, "The state is of LambOptimizer; this trainer has AdamOptimizer."),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    trained: ORTTrainer, change: Any, message: str
) -> None:
    other = trainer(started(), optim.AdamConfig(lr=0.05))
    state = trained.state_dict()
    change(state)
    with pytest.raises(TrainerError) as caught:
        other.load_state_dict(state)
    assert str(caught.value) == message
    assert torch.equal(other._whole.model.first.weight, started().first.weight)


def test_a_state_that_is_not_strict_loads_what_there_is(trained: ORTTrainer) -> None:
    other = trainer(started(), optim.AdamConfig(lr=0.05))
    state = trained.state_dict()
    _with_another_weight(state)
    other.load_state_dict(state, strict=False)
    assert torch.equal(other._whole.model.first.weight, trained._whole.model.first.weight)
    assert torch.equal(other._whole.model.last.bias, started().last.bias)
