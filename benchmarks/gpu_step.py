"""Training steps on a GPU, on ONNX Runtime and in eager PyTorch, as ratios.

``--emulate`` runs them on the CPU. Each step is timed by events on the device, and by the host's clock until
the step is queued.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from _machine import machine

import torch2ort
from torch2ort.runtime import stock

ROUNDS = 30


class Scale(torch.autograd.Function):
    """A small Function, so that the overhead of its call dominates."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x).sum(0)


class Functions(torch.nn.Module):
    """Layers of some width with a Function behind each."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(depth)])
        self.scales = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(width)) for _ in range(depth)])

    def forward(self, x):
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = Scale.apply(torch.tanh(layer(x)), scale)
        return x


class Encoder(torch.nn.Module):
    """A transformer without dropout, of PyTorch's own parts."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(
                width, 8, 4 * width, dropout=0.0, activation="gelu", batch_first=True
            )
            for _ in range(depth)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def stepping(module: torch.nn.Module, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a training step, which returns its loss."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def timed(step: Callable[[], torch.Tensor], *, on_gpu: bool) -> tuple[float, float]:
    """Return seconds on the device, and of the host until the step is queued."""
    if not on_gpu:
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start,) * 2
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start = time.perf_counter()
    begin.record()
    step()
    end.record()
    queued = time.perf_counter() - start
    end.synchronize()
    return begin.elapsed_time(end) / 1000, queued


def compare(name: str, model: torch.nn.Module, x: torch.Tensor) -> None:
    """Check that both engines give the same losses, time them in turn, and print a line."""
    on_gpu = x.is_cuda
    module = torch2ort.ORTModule(copy.deepcopy(model), options=torch2ort.Options(cache_dir=False))
    ways = {"eager": stepping(model, x), "ORTModule": stepping(module, x)}
    for _ in range(5):
        losses = {way: step() for way, step in ways.items()}
        torch.testing.assert_close(losses["ORTModule"], losses["eager"], rtol=1e-4, atol=1e-5)
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, step in ways.items():
            found[way].append(timed(step, on_gpu=on_gpu))
    device, host = (
        {way: statistics.median(pair[i] for pair in pairs) for way, pairs in found.items()} for i in range(2)
    )
    print(
        f"{name}, training step: {device['ORTModule'] / device['eager']:.2f} of eager on the device "
        f"({device['ORTModule'] * 1e3:.2f} of {device['eager'] * 1e3:.2f} ms), "
        f"{host['ORTModule'] / host['eager']:.2f} of eager until it is queued",
        flush=True,
    )


def main() -> None:
    """Print one line per model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--emulate", action="store_true", help="small, and on the CPU")
    emulates = parser.parse_args().emulate
    place = torch.device("cpu" if emulates else "cuda")
    width, depth, batch = (32, 2, 4) if emulates else (1024, 8, 16)
    if not emulates:
        stock.try_cuda()
    print(machine() + ("" if emulates else f", {torch.cuda.get_device_name()}"), flush=True)
    torch.manual_seed(1)
    wide, small = torch.randn(batch, 128, width, device=place), torch.randn(batch, 256, device=place)
    compare("a transformer", Encoder(width, depth).to(place), wide)
    compare("small Functions", Functions(256, 4 * depth).to(place), small)


if __name__ == "__main__":
    main()
