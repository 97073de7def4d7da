"""Models that protobuf cannot serialize keep their weights in a file beside the model's own.

The limit is lowered here; the real one was tested with 2.3 GiB of weights, and with one weight above 2 GiB.
"""

from __future__ import annotations

import ctypes
import os

import onnx
import pytest
import torch

import torch2ort
from tests.support.functions import Square

LIMIT = 20_000


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        self.second = torch.nn.Linear(64, 64)

    def forward(self, x):
        return self.second(Square.apply(self.first(x)))


@pytest.fixture
def large(monkeypatch):
    monkeypatch.setattr(onnx.checker, "MAXIMUM_PROTOBUF", LIMIT)
    model, x = Model().eval(), torch.randn(3, 64)
    return torch2ort.export(model, x), x, model(x).detach()


def test_a_call_and_a_session_give_eagers_results(large):
    exported, x, expected = large
    torch.testing.assert_close(exported(x), expected)
    session = exported.session()
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), expected)


def test_the_weights_are_saved_beside_the_model_and_come_back(large, tmp_path):
    exported, x, expected = large
    path = tmp_path / "model.onnx"
    for _ in range(2):  # the second file replaces the first
        exported.save(path)
        assert sorted(os.listdir(tmp_path)) == ["model.onnx", "model.onnx.data"]
        assert path.stat().st_size < LIMIT < path.with_name("model.onnx.data").stat().st_size < 2 * LIMIT
    torch.testing.assert_close(torch2ort.load(path, functions=[Square])(x), expected)


def test_nothing_is_left_behind(large, tmp_path, monkeypatch):
    exported, x, _ = large
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    exported(x)
    assert os.listdir(tmp_path) == []


def test_a_weight_is_written_where_it_stays(monkeypatch):
    """It is not copied by ctypes.string_at, whose size is a C int, or into a list, which is serialized."""
    module, x = torch2ort.ORTModule(Model()).eval(), torch.randn(3, 64)
    module(x)
    assert len(module.exported.python_ops) == 1
    with monkeypatch.context() as refused:
        refused.setattr(ctypes, "string_at", None)
        refused.setattr(onnx, "TensorProto", None)
        proto = module.exported.proto
    found = {one.name: onnx.numpy_helper.to_array(one) for one in proto.graph.initializer}
    for name, weight in module.named_parameters():
        torch.testing.assert_close(torch.from_numpy(found[name].copy()), weight.detach())
