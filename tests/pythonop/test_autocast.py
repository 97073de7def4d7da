"""Functions under torch.autocast: forward under its call's settings, backward as custom_bwd sets them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd

import torch2ort

seen: list[tuple[str, bool, torch.dtype]] = []


def note(where: str) -> None:
    """Record the settings of autocast."""
    seen.append((where, torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))


class Plain(torch.autograd.Function):
    """A matrix product, which autocast casts in forward and not in backward."""

    @staticmethod
    def forward(ctx, x, w):
        note("forward")
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        note("backward")
        x, w = ctx.saved_tensors
        return g.float() @ w.t(), x.t() @ g.float()


class Alike(torch.autograd.Function):
    """Backward runs under forward's settings."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx, x, w):
        note("forward")
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, g):
        note("backward")
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


class Single(torch.autograd.Function):
    """Gets float32 inputs, and runs without autocast."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, w):
        note("forward")
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, g):
        note("backward")
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


class Separate(torch.autograd.Function):
    """Has a setup_context."""

    @staticmethod
    def forward(x, w):
        note("forward")
        return x @ w

    @staticmethod
    def setup_context(ctx, inputs, output):
        note("setup")
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g.float() @ w.t(), x.t() @ g.float()


class Model(nn.Module):
    """A Function behind a layer, and once more where autocast is off."""

    def __init__(self, function) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        y = self.function.apply(self.layer(x).float(), self.layer.weight)
        with torch.autocast("cpu", enabled=False):
            z = self.function.apply(y.float(), self.layer.weight)
        return y.float() + z


def step(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return output and gradients, and reset the recorded settings."""
    seen.clear()
    module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("function", [Plain, Alike, Single, Separate])
def test_functions_run_under_eagers_settings(function) -> None:
    model, x = Model(function), torch.randn(3, 4)
    module = torch2ort.ORTModule(copy.deepcopy(model))
    step(module, x)  # exports
    actual, calls = step(module, x), list(seen)
    expected = step(model, x)
    assert calls == seen
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-6)


def test_a_file_keeps_the_settings_of_a_call(tmp_path) -> None:
    model, x = Model(Plain).eval(), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        exported, expected = torch2ort.export(model, x), model(x)
    exported.save(tmp_path / "model.onnx")
    loaded = torch2ort.load(tmp_path / "model.onnx", functions=[Plain])
    seen.clear()
    torch.testing.assert_close(loaded(x), expected, rtol=3e-2, atol=1e-2)
    assert seen == [("forward", True, torch.bfloat16), ("forward", False, torch.bfloat16)]


def test_the_cache_keeps_settings_apart(tmp_path) -> None:
    x, options = torch.randn(3, 4), torch2ort.Options(cache_dir=tmp_path)
    for hit in (False, True):
        for dtype in (torch.bfloat16, torch.float16):
            torch.manual_seed(0)
            model = Model(Alike)
            module = torch2ort.ORTModule(copy.deepcopy(model), options=options)
            outputs = []
            for run in (module, model):
                seen.clear()  # what the graph is made from
                with torch.autocast("cpu", dtype):
                    outputs.append(run(x))
                outputs[-1].sum().backward()
            assert module.exported.cache.hit == hit
            torch.testing.assert_close(*outputs, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(
                module.layer.weight.grad, model.layer.weight.grad, rtol=1e-6, atol=1e-6
            )
