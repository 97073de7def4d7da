"""A failure is reported by an error alone: onnxruntime does not log its own lines before it."""

from __future__ import annotations

import pytest
import torch

import torch2ort


class Stubborn(torch.autograd.Function):
    fails_in = ""

    @staticmethod
    def forward(ctx, x):
        if Stubborn.fails_in == "forward":
            raise KeyError("no forward")
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        if Stubborn.fails_in == "backward":
            raise KeyError("no backward")
        return grad.clone()


class Table(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(4, 2)

    def forward(self, index):
        return Stubborn.apply(self.rows(index))


INDEX = torch.tensor([1, 2])


@pytest.fixture(scope="module")
def exported():
    return torch2ort.export(Table().eval(), INDEX)


@pytest.fixture(scope="module")
def module():
    module = torch2ort.ORTModule(Table())
    module(INDEX).sum().backward()
    return module


@pytest.fixture(autouse=True)
def _willing():
    yield
    Stubborn.fails_in = ""


def test_a_functions_error_in_an_exported_model(exported, capfd):
    Stubborn.fails_in = "forward"
    with pytest.raises(KeyError, match="no forward"):
        exported(INDEX)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_functions_error_in_training(part, module, capfd):
    Stubborn.fails_in = part
    with pytest.raises(KeyError, match=f"no {part}"):
        module(INDEX).sum().backward()
    assert capfd.readouterr().err == ""


def test_an_index_out_of_range(exported, module, capfd):
    for call in (exported, module):
        with pytest.raises(IndexError, match="index out of range in self"):
            call(torch.tensor([1, 9]))
    assert capfd.readouterr().err == ""


def test_a_damaged_file(exported, tmp_path, capfd):
    path = tmp_path / "model.onnx"
    exported.save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(torch2ort.ModelLoadError):
        torch2ort.load(path, functions=[Stubborn])
    assert capfd.readouterr().err == ""
