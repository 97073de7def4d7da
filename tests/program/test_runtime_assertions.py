"""Conditions that a model asserts on values are checked in every run, and raise as in eager PyTorch."""

from __future__ import annotations

import onnxruntime
import pytest
import torch
from torch import nn

import torch2ort


def on_an_integer(x, k):
    torch._check(k.max().item() <= 3, lambda: "too large")
    return x


def on_an_integer_that_is_computed_with(x, k):
    number = k.max().item()
    torch._check(number + 1 < 5)
    return x * number


def on_a_float(x, k):
    torch._check(k.float().mean().item() < 2.5)
    return x


def on_two_numbers(x, k):
    torch._check(k[0].item() + k[1].item() != 6)
    return x


def on_a_size(x, k):
    torch._check(k.max().item() <= x.shape[0])
    return x


def on_a_truth_value(x, k):
    torch._assert_async((k <= 3).all())
    return x


def on_a_truth_value_with_a_message(x, k):
    torch._assert_async((k <= 3).all(), "too large")
    return x


BEFORE_2_13 = torch.__version__.startswith(("2.11.", "2.12."))
BODIES = [
    on_an_integer,
    on_an_integer_that_is_computed_with,
    pytest.param(
        on_a_float,
        marks=pytest.mark.skipif(BEFORE_2_13, reason="torch.export stops at conditions on such a number"),
    ),
    on_two_numbers,
    on_a_size,
    on_a_truth_value,
    on_a_truth_value_with_a_message,
]
HOLDS, FAILS = torch.tensor([1, 2]), torch.tensor([1, 5])


class Model(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.body = body

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return self.layer(self.body(x, k))


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("body", BODIES)
def test_a_model_raises_where_eager_does(body, is_training):
    model = Model(body).train(is_training)
    module = torch2ort.ORTModule(model)
    x = torch.randn(3, 4)
    with torch.set_grad_enabled(is_training):
        torch.testing.assert_close(module(x, HOLDS), model(x, HOLDS))
        with pytest.raises(RuntimeError):
            model(x, FAILS)
        with pytest.raises(RuntimeError):
            module(x, FAILS)
        torch.testing.assert_close(module(x, HOLDS), model(x, HOLDS))


@pytest.mark.parametrize("body", BODIES)
def test_a_loaded_file_raises_and_a_plain_session_computes(body, tmp_path):
    model, x = Model(body).eval(), torch.randn(3, 4)
    torch2ort.export(model, (x, HOLDS)).save(tmp_path / "model.onnx")
    loaded = torch2ort.load(tmp_path / "model.onnx")
    torch.testing.assert_close(loaded(x, HOLDS), model(x, HOLDS))
    with pytest.raises(RuntimeError):
        loaded(x, FAILS)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    (found,) = session.run(None, dict(zip(names, (x.numpy(), HOLDS.numpy()), strict=True)))
    torch.testing.assert_close(torch.from_numpy(found), model(x, HOLDS))
    assert {node.domain for node in loaded.proto.graph.node} == {""}


MESSAGES = {
    on_an_integer: (
        r"^a condition of the model does not hold for the number that is read at "
        r".*test_runtime_assertions\.py:\d+, in \S+: .*self\.body\(x, k\)\)$"
    ),
    on_a_truth_value: "^Expected Tensor with single nonzero value, but got zero$",
    on_a_truth_value_with_a_message: "^too large$",
}


@pytest.mark.parametrize("body", MESSAGES)
def test_the_error_says_which_condition(body):
    module = torch2ort.ORTModule(Model(body))
    with pytest.raises(RuntimeError, match=MESSAGES[body]):
        module(torch.randn(3, 4), FAILS)


def test_a_condition_that_no_tensor_computes_is_refused():
    def forward(x, k):
        torch._check(k.max().item() // 2 < 2)
        return x

    message = (
        r"^<built-in function floordiv> at .*test_runtime_assertions\.py:\d+, in \S+: .* computes a number "
        r"that the model sets a condition on, and no tensor is computed so\. Set the condition on a tensor, "
        r"by torch\._assert_async\(x\.max\(\) < 3\)$"
    )
    with pytest.raises(torch2ort.UnsupportedOperatorError, match=message):
        torch2ort.export(Model(forward), (torch.randn(3, 4), HOLDS))
