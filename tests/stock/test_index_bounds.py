"""A loaded file refuses the indices that eager refuses, with its error; a plain session refuses them too."""

from __future__ import annotations

import onnxruntime
import pytest
import torch
import torch.nn.functional as F

import torch2ort
from tests.ops.indices import USES, Indexing, inputs, outcome
from tests.support.sweeps import thinned


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    path = tmp_path_factory.mktemp("indices") / "model.onnx"
    torch2ort.export(Indexing().eval(), inputs()).save(path)
    return torch2ort.load(path)


@pytest.mark.parametrize("name", thinned(USES, 2))
def test_a_loaded_file_does_with_another_index_what_eager_does(loaded, name):
    number = USES[name].others[-1]
    tensors, indices = inputs(**{name: number})
    expected = outcome(USES[name].call, tensors[name], indices[name])
    actual = outcome(lambda *both: loaded(*both)[name], tensors, indices)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(actual, expected)
    else:
        assert actual == expected


class Plain(torch.nn.Module):
    """Operators that ONNX has, each with indices of its own."""

    def forward(self, h, rows, classes, hot):
        return F.embedding(rows, h), F.cross_entropy(h, classes), F.one_hot(hot, 4)


@pytest.mark.parametrize("number", [-1, 9])
@pytest.mark.parametrize("position", [1, 2, 3])
def test_a_plain_session_refuses_an_index_outside(tmp_path, position, number):
    sample = [torch.randn(5, 4), *(torch.tensor([0, 3, 1, 2, 0]) for _ in range(3))]
    torch2ort.export(Plain().eval(), tuple(sample)).save(tmp_path / "model.onnx")
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        tmp_path / "model.onnx", settings, providers=["CPUExecutionProvider"]
    )
    names = [value.name for value in session.get_inputs()]
    session.run(None, {n: t.numpy() for n, t in zip(names, sample, strict=True)})
    sample[position][1] = number
    with pytest.raises(Exception, match=r"^\[ONNXRuntimeError\] : .*Gather"):
        session.run(None, {n: t.numpy() for n, t in zip(names, sample, strict=True)})
