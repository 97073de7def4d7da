"""A bool output of a Function is bool wherever the model returns it."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import Function

import torch2ort
from tests.support.callable_module import CallableModule
from tests.support.comparison import assert_same, assert_trains_like_eager


class Above(Function):
    @staticmethod
    def forward(ctx, x):
        mask = x > 0
        ctx.mark_non_differentiable(mask)
        return x * 2, mask

    @staticmethod
    def backward(ctx, grad, _):
        return grad * 2


class OnlyMask(Function):
    @staticmethod
    def forward(ctx, x):
        return x > 0

    @staticmethod
    def backward(ctx, _):
        return None


class Twice(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


CALLS = {
    "beside a float": lambda model, h: Above.apply(h),
    "alone": lambda model, h: (h * 1, OnlyMask.apply(h)),
    "behind another Function": lambda model, h: (h * 1, OnlyMask.apply(Twice.apply(h))),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_models_output_is_a_bool(call, tmp_path):
    model, x = CallableModule(call), torch.randn(3, 4)
    exported = torch2ort.export(model, x)
    exported.save(tmp_path / "model.onnx")
    loaded = torch2ort.load(tmp_path / "model.onnx", functions=(Above, OnlyMask, Twice))
    wrapped = torch2ort.ORTModule(model)
    expected = model(x)[1]
    with torch.no_grad():
        inference = wrapped(x)[1]
    found = {
        "training": wrapped(x)[1],
        "inference": inference,
        "export": exported(x)[1],
        "file": loaded(x)[1],
    }
    for name, mask in found.items():
        assert mask.dtype is torch.bool, name
        assert torch.equal(mask, expected), name


USES = {
    "Not": lambda model, h: h * ~OnlyMask.apply(h),
    "Concat": lambda model, h: torch.cat([h, h]) * torch.cat([OnlyMask.apply(h), h > 1]),
    "GatherElements": lambda model, h: h * OnlyMask.apply(h).gather(0, torch.zeros(3, 4, dtype=torch.long)),
    "And, of two": lambda model, h: h * (OnlyMask.apply(h) & Above.apply(h)[1]),
    "Where": lambda model, h: torch.where(OnlyMask.apply(h), h, Above.apply(h)[0]),
    "a Function": lambda model, h: h * OnlyMask.apply(OnlyMask.apply(h)),
    "a sum": lambda model, h: h + OnlyMask.apply(h).sum(-1, keepdim=True),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_operators_take_it_for_a_bool(use):
    model, x = CallableModule(use), torch.randn(3, 4)
    assert_trains_like_eager(model, [(x,)], steps=2)
    assert_same(torch2ort.export(model, x)(x), model(x), "output")
