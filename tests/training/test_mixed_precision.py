"""Training loops in mixed precision: gradient scaling, fused optimizers, loss curves."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch2ort


class Classifier(nn.Module):
    """Two layers and a loss, which overflows in float16 if ``scale`` is large."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x, labels, scale):
        logits = self.second(F.gelu(self.first(self.norm(x))))
        return F.cross_entropy(logits, labels) * scale


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers, the index of whose largest is the label."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    return x, x[:, :4].argmax(1)


def scaled(module: nn.Module, *, overflows: int) -> tuple[list[float], list[float]]:
    """Losses and scales of some steps with a GradScaler, one of which has an infinite gradient."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    losses, scales = [], []
    for step in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = module(*batch(step), torch.tensor(float("inf") if step == overflows else 1.0))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, scales


def test_a_gradient_scaler_skips_the_steps_that_it_skips_in_eager() -> None:
    model = Classifier()
    module = torch2ort.ORTModule(copy.deepcopy(model))
    (actual, scales), (expected, eagers) = (scaled(m, overflows=3) for m in (module, model))
    assert scales == eagers
    assert scales[3] < scales[2]
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=1e-3)
    for a, e in zip(module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, e, rtol=2e-3, atol=1e-3)


class Wrapped(nn.Module):
    """A model in the form that accelerate gives it: autocast inside of forward, and results in float32."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args):
        with torch.autocast("cpu", torch.bfloat16):
            return self.module(*args).float()


def curve(module: nn.Module, steps: int) -> torch.Tensor:
    """The losses of a training."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = module(*batch(step % 20), torch.tensor(1.0))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().float())
    return torch.stack(losses)


@pytest.mark.parametrize("outside", [True, False])
def test_200_steps_in_bfloat16_are_eagers(outside) -> None:
    model = Classifier()
    module = copy.deepcopy(model)
    ways = (
        Wrapped(torch2ort.ORTModule(module)) if outside else torch2ort.ORTModule(Wrapped(module)),
        Wrapped(model),
    )
    actual, expected = (curve(way, 200) for way in ways)
    assert expected[-20:].mean() < expected[:20].mean() / 4
    # A difference of rounding in one step grows; the training converges to the same losses.
    torch.testing.assert_close(actual[:20], expected[:20], rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(actual[-20:].mean(), expected[-20:].mean(), rtol=0.2, atol=0.02)


class Encoder(nn.Module):
    """A transformer with dropout, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x, labels, scale):
        hidden = self.body(self.first(x.reshape(4, 4, 8).to(self.first.weight.dtype)))
        return F.cross_entropy(self.last(hidden).flatten(0, 1), labels) * scale


def test_a_transformer_wholly_in_bfloat16_learns_bit_for_bit_as_in_eager() -> None:
    model = Encoder().bfloat16()
    curves = []
    for way in (torch2ort.ORTModule(copy.deepcopy(model)), model):
        torch.manual_seed(0)
        curves.append(curve(way, 60))
    actual, expected = curves
    assert expected[-10:].mean() < expected[:10].mean()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_a_loss_that_float16_cannot_hold_is_computed_in_float32() -> None:
    model = nn.Linear(8, 4)
    with torch.no_grad():
        model.weight.mul_(2000)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model

        def forward(self, x, labels):
            return F.cross_entropy(self.layer(x), labels, reduction="sum") * 1024

    x, labels = batch(0)
    losses = []
    for module in (torch2ort.ORTModule(Loss()), Loss()):
        with torch.autocast("cpu", torch.float16):
            losses.append(module(x, labels))
    assert losses[0].dtype is torch.float32
    assert losses[0].isfinite()
    assert losses[0] > torch.finfo(torch.float16).max
    torch.testing.assert_close(*losses)


def test_a_retained_graph_gives_its_gradients_again() -> None:
    model = Classifier()
    module = torch2ort.ORTModule(copy.deepcopy(model))
    for run in (module, model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(*batch(0), torch.tensor(1.0))
        loss.backward(retain_graph=True)
        loss.backward()
    for a, e in zip(module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, e.grad, rtol=1e-4, atol=1e-6)


def test_two_calls_in_one_region_add_their_gradients_up() -> None:
    model = Classifier()
    module = torch2ort.ORTModule(copy.deepcopy(model))
    for run in (module, model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(*batch(0), torch.tensor(1.0)) + run(*batch(1), torch.tensor(1.0))
        loss.backward()
    for a, e in zip(module.parameters(), model.parameters(), strict=True):
        # Eager PyTorch adds up the gradients of its cached cast of a parameter in bfloat16.
        torch.testing.assert_close(a.grad, e.grad, rtol=3e-2, atol=1e-3)
