"""What fused regions and inlined Functions gain in a training step, as ratios to eager PyTorch."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch
from _machine import machine
from _timing import interleaved_medians
from torch import Tensor, nn

import torch2ort

FUNCTIONS = 50


class Tiny(torch.autograd.Function):
    """A tanh with its derivative written out."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        result = torch.tanh(x)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return grad * (1 - result * result)


class Chain(nn.Module):
    """Functions in a row behind one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((256,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        for _ in range(FUNCTIONS):
            x = Tiny.apply(x)
        return x.square().mean()


class Convolutions(nn.Module):
    """Six convolutions with BatchNorm and ReLU."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(3, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        layers = [
            [nn.Conv2d(taken, given, 3, stride, 1, bias=False), nn.BatchNorm2d(given), nn.ReLU()]
            for taken, given, stride in sizes
        ]
        self.layers = nn.Sequential(*(module for layer in layers for module in layer))
        self.last = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x).mean((2, 3))).square().mean()


class Recurrent(nn.Module):
    """An LSTM of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 128, 2, batch_first=True)
        self.last = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x)[0][:, -1]).square().mean()


class Gates(nn.Module):
    """Four layers with gates and LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64)]) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for wide, narrow, norm in self.layers:
            h = wide(x)
            x = norm(x + narrow(h * torch.sigmoid(1.7 * h) * torch.tanh(h)))
        return x.square().mean()


MODELS = {
    f"{FUNCTIONS} Functions of 256 floats": (Chain, (256,)),
    "conv + BatchNorm, 8x3x32x32": (Convolutions, (8, 3, 32, 32)),
    "LSTM, 16x32x64": (Recurrent, (16, 32, 64)),
    "gates, 64x64": (Gates, (64, 64)),
}


def training(module: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """A forward and backward of `module`, which returns its loss."""

    def step() -> Tensor:
        module.zero_grad()
        loss = module(x)
        loss.backward()
        return loss.detach()

    return step


def on_ort(model: nn.Module, x: Tensor, *, fuse: bool = False, varies: bool = False) -> Callable[[], Tensor]:
    """The same of a wrapped copy, built by one step, or for batches that vary by two."""
    options = torch2ort.Options(fuse=fuse)
    module = torch2ort.ORTModule(copy.deepcopy(model), options=options)
    if varies:
        training(module, x[: len(x) // 2])()
    step = training(module, x)
    step()
    return step


def compare(name: str) -> None:
    """Check that all ways agree, time them, and print one line."""
    kind, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = kind().train(), torch.randn(shape)
    ways = {"torch2ort": on_ort(model, x)}
    if kind is Chain:
        torch2ort.register_inline(Tiny)
        ways["torch2ort, inlined"] = on_ort(model, x)
    ways["torch2ort, fused"] = on_ort(model, x, fuse=True)
    if kind in (Convolutions, Gates):
        ways["torch2ort, batch varies"] = on_ort(model, x, varies=True)
        ways["torch2ort, fused, batch varies"] = on_ort(model, x, fuse=True, varies=True)
    ways["torch.compile"] = training(torch.compile(copy.deepcopy(model)), x)
    ways["eager"] = training(model, x)
    losses = {way: step() for way, step in ways.items()}
    for loss in losses.values():
        torch.testing.assert_close(loss, losses["eager"], rtol=1e-3, atol=1e-4)
    seconds = interleaved_medians(ways, rounds=50, clock=time.thread_time)
    ratios = [f"{way} {cost / seconds['eager']:.2f}" for way, cost in seconds.items() if way != "eager"]
    print(f"{name}, forward + backward, 1 thread, ratio to eager: {', '.join(ratios)}", flush=True)


def main() -> None:
    """Print one line a model."""
    torch.set_num_threads(1)
    print(machine(), flush=True)
    for name in MODELS:
        compare(name)


if __name__ == "__main__":
    main()
