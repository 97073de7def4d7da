"""A loaded file refuses the same indices as eager PyTorch, with its error; a plain session follows ONNX."""

from __future__ import annotations

import onnxruntime
import pytest
import torch
import torch.nn.functional as F

import torch2ort
from tests.ops.indices import USES, Indexing, inputs, outcome
from tests.support.sweeps import sample_cases


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    path = tmp_path_factory.mktemp("indices") / "model.onnx"
    torch2ort.export(Indexing().eval(), inputs()).save(path)
    return torch2ort.load(path)


@pytest.mark.parametrize("name", sample_cases(USES, 4))
def test_a_loaded_file_does_with_another_index_what_eager_does(loaded, name):
    number = USES[name].others[-1]
    tensors, indices = inputs(**{name: number})
    expected = outcome(USES[name].call, tensors[name], indices[name])
    actual = outcome(lambda *both: loaded(*both)[name], tensors, indices)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(actual, expected)
    else:
        assert actual == expected


class Rows(torch.nn.Module):
    def forward(self, table, rows):
        return F.embedding(rows, table)


@pytest.fixture
def plain_rows(tmp_path):
    """A plain session of a lookup of rows, and the table."""
    table = torch.randn(5, 4)
    torch2ort.export(Rows().eval(), (table, torch.tensor([0, 3]))).save(tmp_path / "model.onnx")
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    path = tmp_path / "model.onnx"
    return onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"]), table


def run(session, table, rows):
    return session.run(None, {"table": table.numpy(), "rows": torch.tensor(rows).numpy()})[0]


def test_a_plain_session_refuses_an_index_outside(plain_rows):
    with pytest.raises(Exception, match=r"^\[ONNXRuntimeError\] : .*Gather"):
        run(*plain_rows, [0, 9])


def test_a_plain_session_counts_a_negative_index_from_the_end(plain_rows):
    table = plain_rows[1]
    torch.testing.assert_close(torch.from_numpy(run(*plain_rows, [0, -1])), table[[0, 4]])
