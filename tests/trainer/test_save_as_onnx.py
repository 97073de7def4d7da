"""The files of save_as_onnx, and the check of an export."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch

from tests.support.functions import Square
from tests.trainer.models import DESCRIPTION, Net, batches, cross_entropy, options, started, trainer
from torch2ort.errors import ExportError, OptionError
from torch2ort.exported_model import load
from torch2ort.trainer import ORTTrainer, optim


@pytest.fixture(scope="module")
def trained() -> ORTTrainer:
    tried = trainer(started())
    tried.train_step(*next(batches(1)))
    return tried


@pytest.fixture(scope="module")
def saved(trained: ORTTrainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model.onnx"
    trained.save_as_onnx(str(path))
    return path


def test_a_saved_model_has_the_described_names_and_the_model_s_weights(saved: Path) -> None:
    graph = onnx.load(saved).graph
    assert [value.name for value in graph.input] == ["x", "label"]
    assert [value.name for value in graph.output] == ["loss", "logits"]
    assert {name for name, _ in Net().named_parameters()} <= {value.name for value in graph.initializer}
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_a_saved_model_computes_what_eval_step_does_with_any_size(trained: ORTTrainer, saved: Path) -> None:
    session = onnxruntime.InferenceSession(saved, providers=["CPUExecutionProvider"])
    ((x, y),) = batches(1, size=7)
    found = session.run(None, {"x": x.numpy(), "label": y.numpy()})
    torch.testing.assert_close([torch.from_numpy(value) for value in found], list(trained.eval_step(x, y)))


def test_a_saved_model_is_the_model_of_that_moment(tmp_path: Path) -> None:
    model = started()
    tried = trainer(model)
    tried.eval_step(*next(batches(1)))
    with torch.no_grad():
        model.last.bias.fill_(3.0)
    tried.save_as_onnx(str(tmp_path / "model.onnx"))
    weights = {one.name: one for one in onnx.load(tmp_path / "model.onnx").graph.initializer}
    assert onnx.numpy_helper.to_array(weights["last.bias"]).tolist() == [3.0] * 3


class Squared(Net):
    """Calls a Function, which stays a call in a file."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Square.apply(super().forward(x))


def test_a_saved_model_with_functions_is_loaded_with_them(tmp_path: Path) -> None:
    tried = trainer(Squared())
    x, y = next(batches(1))
    expected = tried.eval_step(x, y)
    tried.save_as_onnx(str(tmp_path / "model.onnx"))
    found = load(tmp_path / "model.onnx", functions=[Square])(x, y)
    torch.testing.assert_close(list(found), list(expected))


def test_a_model_cannot_be_saved_before_a_step(tmp_path: Path) -> None:
    with pytest.raises(RuntimeWarning) as caught:
        trainer().save_as_onnx(str(tmp_path / "model.onnx"))
    assert str(caught.value) == (
        "save_as_onnx needs a train_step or eval_step before it, by whose inputs the model is exported."
    )


@pytest.mark.parametrize("path", ["", "/no/such/model.onnx", 3])
def test_a_path_that_is_none_is_refused(trained: ORTTrainer, path: object) -> None:
    with pytest.raises(OptionError) as caught:
        trained.save_as_onnx(path)
    assert str(caught.value) == f"path is {path!r}; allowed is the path of a file in a folder that exists."


class Random(Net):
    """Draws in evaluation mode, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.nn.functional.dropout(x, 0.5))


def test_an_export_is_checked_before_the_first_step_if_that_is_asked_for() -> None:
    x, y = next(batches(1))
    trainer(debug={"check_model_export": True}).train_step(x, y)
    model = Random()
    before = model.last.weight.detach().clone()
    with pytest.raises(
        ExportError, match=r"^Option debug\.check_model_export: output 'loss' of the exported"
    ):
        trainer(model, debug={"check_model_export": True}).train_step(x, y)
    assert torch.equal(model.last.weight, before)


def test_a_size_that_the_model_fixes_is_no_size_that_varies(tmp_path: Path) -> None:
    class Fixed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.reshape(4, 4))

    tried = ORTTrainer(Fixed(), DESCRIPTION, optim.SGDConfig(), cross_entropy, options())
    tried.eval_step(*next(batches(1)))
    with pytest.raises(ExportError) as caught:
        tried.save_as_onnx(str(tmp_path / "model.onnx"))
    assert str(caught.value) == (
        "The size 'batch' of the input 'x' does not vary: the model holds for 4 alone. Describe it as 4."
    )
