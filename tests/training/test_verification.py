"""``Options.verify`` compares the first step with eager PyTorch."""

from __future__ import annotations

import pytest
import torch

import torch2ort
from tests.support.functions import Square, TwoOutputs
from torch2ort.training import verification as _verify


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x):
        doubled, summed = TwoOutputs.apply(self.dropout(self.norm(Square.apply(self.layer(x)))))
        return {"a": doubled, "b": summed}


def step(module):
    outputs = module(torch.randn(5, 4, requires_grad=True))
    (outputs["a"].sum() + outputs["b"].square().sum()).backward()


def test_an_equal_step_passes_and_leaves_the_model_alone():
    module = torch2ort.ORTModule(Model(), options=torch2ort.Options(verify=True))
    step(module)
    assert module.norm.num_batches_tracked == 1
    step(module)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("check_outputs", r"verify: output 'a' differs from eager PyTorch's: "),
        ("check_gradients", r"verify: gradient of input 'x' differs from eager PyTorch's: "),
    ],
)
def test_a_difference_is_named(monkeypatch, name, message):
    check = getattr(_verify.Verification, name)

    def spoiled(self, *args):
        *before, tensors = args
        check(self, *before, [None if t is None else t + 1 for t in tensors])

    monkeypatch.setattr(_verify.Verification, name, spoiled)
    module = torch2ort.ORTModule(Model(), options=torch2ort.Options(verify=True))
    with pytest.raises(torch2ort.EngineError, match=message):
        step(module)
