"""The cost of a call of torch.compile on ONNX Runtime, beside Inductor's, aot_eager's and ORTModule's.

A small net shows the overhead of a graph's call, a BERT the cost of a step.
"""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Callable

import torch
from _machine import machine
from _models import MODELS, batch
from _timing import interleaved_medians
from torch import Tensor, nn

import torch2ort

ROWS, WIDTH = 8, 64
BACKENDS = ("torch2ort", "aot_eager", *(["inductor"] if shutil.which("g++") else []))


def small() -> nn.Module:
    """Three layers, for which the overhead of a call exceeds the cost of its graph."""
    torch.manual_seed(1)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))]
    return nn.Sequential(*layers)


def each_way(model: nn.Module) -> dict[str, nn.Module]:
    """Copies of a model, by the names of the engines."""
    compiled = {name: torch.compile(copy.deepcopy(model), backend=name) for name in BACKENDS}
    return {"eager": model, **compiled, "ORTModule": torch2ort.ORTModule(copy.deepcopy(model))}


def compare(title: str, ways: dict[str, Callable[[], Tensor]], *, rounds: int, calls: int) -> None:
    """Check that all engines agree, time them, and print one line."""
    for way in ways.values():
        torch.testing.assert_close(way(), ways["eager"](), rtol=1e-4, atol=1e-5)
    seconds = interleaved_medians(ways, rounds=rounds, calls=calls, clock=time.thread_time)
    ratios = ", ".join(f"{name} {seconds[name] / seconds['eager']:.2f}" for name in ways if name != "eager")
    peer = seconds["torch2ort"] / seconds["aot_eager"]
    print(f"{title}, 1 thread, ratio to eager ({1e6 * seconds['eager']:.0f} us): {ratios}; ", end="")
    print(f"torch2ort to aot_eager {peer:.2f}", flush=True)


def inference(module: nn.Module, rows: Tensor) -> Callable[[], Tensor]:
    """Return a function that calls `module` without gradients."""

    def call() -> Tensor:
        with torch.no_grad():
            return module(rows)

    return call


def step(module: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> Callable[[], Tensor]:
    """Return a function that runs forward and backward of `module`."""

    def call() -> Tensor:
        module.zero_grad()
        loss = loss_of(module)
        loss.backward()
        return loss.detach()

    return call


def main() -> None:
    """Print one line per model and kind of call."""
    torch.set_num_threads(1)
    print(machine(), flush=True)
    rows = torch.randn(ROWS, WIDTH)
    what = f"3 layers {ROWS}x{WIDTH}"
    ways = each_way(small())
    compare(f"{what}, inference", {n: inference(m, rows) for n, m in ways.items()}, rounds=25, calls=50)
    losses = {n: step(m, lambda module: module(rows).square().mean()) for n, m in ways.items()}
    compare(f"{what}, forward + backward", losses, rounds=25, calls=20)
    arguments = batch("BERT", 4)
    ways = each_way(MODELS["BERT"]())
    steps = {n: step(m, lambda module: module(**arguments).loss) for n, m in ways.items()}
    compare("BERT 4x128, forward + backward", steps, rounds=11, calls=1)


if __name__ == "__main__":
    main()
