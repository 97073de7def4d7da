"""Lightning trains an ORTModule as it trains the model: a LightningModule, or the network inside one."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

import torch2ort
from tests.loops.models import Classifier, ran_on_onnx_runtime, rows
from torch2ort import io_schema
from torch2ort.cache.key.key import dependencies

lightning = pytest.importorskip("lightning")

JOINT = torch2ort.Options()


class Learner(lightning.LightningModule):
    """Trains a classifier, and records losses and the engine that they come from."""

    def __init__(self, width: int = 8, rate: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = Classifier(width)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x):
        return self.network(self.norm(x))

    def training_step(self, batch, index):
        x, y = batch
        output = self(x)
        loss = torch.nn.functional.cross_entropy(output, y)
        self.notes.append((loss.item(), ran_on_onnx_runtime(output)))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("validation", torch.nn.functional.cross_entropy(self(x), y))

    def predict_step(self, batch, index):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.rate)


class Outside(Learner):
    """Only its network is on ONNX Runtime."""

    def __init__(self, width: int = 8, rate: float = 0.05) -> None:
        super().__init__(width, rate)
        self.network = torch2ort.ORTModule(self.network, options=JOINT)


def learner(where: str, seed: int = 1):
    torch.manual_seed(seed)
    made = Outside() if where == "the network" else Learner()
    # Not an attribute on which a graph depends.
    notes = []
    object.__setattr__(made, "notes", notes)
    return torch2ort.ORTModule(made, options=JOINT) if where == "the whole" else made


def fit(where: str, precision: str, folder):
    """Validate, train an epoch, predict, save; then a new model resumes from the file."""
    data = torch.utils.data.DataLoader(rows(), batch_size=8)

    def trainer(epochs: int):
        return lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            precision=precision,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )

    model, run = learner(where), trainer(1)
    found = [run.validate(model, data, verbose=False)[0]["validation"]]
    run.fit(model, data, data)
    predictions = run.predict(model, data)
    path = folder / "last.ckpt"
    run.save_checkpoint(path)
    later = learner(where, seed=9)
    trainer(2).fit(later, data, data, ckpt_path=path, weights_only=False)
    notes = [*model.notes, *later.notes]
    assert {on_onnx_runtime for _, on_onnx_runtime in notes} == {where != "nowhere"}
    found += [loss for loss, _ in notes]
    return torch.tensor(found), predictions, later.state_dict(), (model, path)


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        # Warnings about the number of workers that load data, and similar ones.
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", torch2ort.Torch2OrtWarning)
        yield


@pytest.mark.parametrize(
    ("where", "precision"),
    [
        pytest.param("the whole", "32-true", marks=pytest.mark.long),
        ("the whole", "bf16-mixed"),
        pytest.param("the network", "32-true", marks=pytest.mark.long),
        pytest.param("the network", "bf16-mixed", marks=pytest.mark.long),
    ],
)
def test_validate_first_fit_predict_and_go_on(where, precision, tmp_path):
    *expected, _ = fit("nowhere", precision, tmp_path)
    *actual, (model, path) = fit(where, precision, tmp_path)
    assert len(actual[0]) == 13
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    loaded = type(model).load_from_checkpoint(path, weights_only=False)
    assert dict(loaded.hparams) == {"width": 8, "rate": 0.05}
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


class Named:
    def __init__(self, name: str) -> None:
        self.name = name


class Factor(Named):
    def __init__(self, value: float) -> None:
        super().__init__("factor")
        self.value = value


class Building(Learner):
    """Its forward reads the name ``__init__``, as the constructors of Lightning do."""

    def forward(self, x):
        return super().forward(x) * Factor(2.0).value


def test_a_forward_that_builds_objects_depends_on_no_trainer(tmp_path):
    trainer = lightning.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path)
    model = Building()
    model.notes = []
    trainer.strategy.connect(model)
    model.trainer = trainer
    tensors, schema = io_schema.flatten({"x": torch.zeros(8, 4)})
    found = dependencies(model, tensors, schema, with_hooks=False)
    assert [part for part in found.components if "rainer" in part] == []


class WithoutForward(lightning.LightningModule):
    def training_step(self, batch, index):
        return self.network(batch)


def test_a_lightning_module_without_forward_is_refused():
    with pytest.raises(torch2ort.ExportError, match=r"^ORTModule: WithoutForward defines no forward, and"):
        torch2ort.ORTModule(WithoutForward())


def test_load_from_checkpoint_gives_other_arguments_to_the_model(tmp_path):
    model = torch2ort.ORTModule(Learner(width=6))
    trainer = lightning.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path)
    trainer.strategy.connect(model)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    loaded = type(model).load_from_checkpoint(tmp_path / "x.ckpt", weights_only=False, rate=0.5)
    assert type(loaded) is Learner
    assert (loaded.hparams.width, loaded.hparams.rate) == (6, 0.5)


class Warmed(Learner):
    """Reads the trainer's progress in forward."""

    def forward(self, x):
        output = super().forward(x)
        return output * 0.5 if self.current_epoch < 1 else output * self.trainer.max_epochs


@pytest.mark.long
def test_a_forward_that_asks_for_the_epoch_has_a_graph_for_each(tmp_path):
    found = []
    for wrap in (lambda model: model, lambda model: torch2ort.ORTModule(model, options=JOINT)):
        torch.manual_seed(1)
        model = Warmed()
        notes = []
        object.__setattr__(model, "notes", notes)
        trainer = lightning.Trainer(
            max_epochs=3,
            accelerator="cpu",
            logger=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(wrap(model), torch.utils.data.DataLoader(rows(), batch_size=24))
        found.append(torch.tensor([loss for loss, _ in notes]))
    assert all(on_onnx_runtime for _, on_onnx_runtime in notes)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
