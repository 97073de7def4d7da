"""What measured operators gain in a training step, as ratios to eager PyTorch, and what was chosen."""

from __future__ import annotations

import copy
import logging
import re
import time
from collections.abc import Callable
from typing import Any

import torch
from _machine import machine
from _models import MODELS, batch
from _timing import interleaved_medians
from fused_regions import Convolutions, Recurrent
from torch import Tensor, nn

import torch2ort

BATCH = 8


class Separable(nn.Module):
    """A convolution, and five depthwise ones with a pointwise one behind each, as MobileNet has them."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(32, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]
        layers = [nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
        for taken, given, stride in sizes:
            layers += [nn.Conv2d(taken, taken, 3, stride, 1, groups=taken, bias=False), nn.BatchNorm2d(taken)]
            layers += [nn.ReLU(), nn.Conv2d(taken, given, 1, bias=False), nn.BatchNorm2d(given), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.last = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x).mean((2, 3))).square().mean()


NETS = {
    "conv + BatchNorm, 8x3x32x32": (Convolutions, (8, 3, 32, 32)),
    "depthwise conv + BatchNorm, 8x3x32x32": (Separable, (8, 3, 32, 32)),
    "LSTM, 16x32x64": (Recurrent, (16, 32, 64)),
}


class Chosen(logging.Handler):
    """Counts what runs otherwise than by the rule."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        said = re.fullmatch(r"autotune: (.* microseconds\))\.", record.getMessage())
        if said is not None:
            self.found.append(said[1])


def training(module: nn.Module, given: dict[str, Any] | Tensor) -> Callable[[], Tensor]:
    """A forward and backward of `module`, which returns its loss."""

    def step() -> Tensor:
        module.zero_grad()
        result = module(given) if isinstance(given, Tensor) else module(**given).loss
        result.backward()
        return result.detach()

    return step


def compare(name: str, model: nn.Module, given: dict[str, Any] | Tensor) -> None:
    """Check that all ways agree, time them, and print a line, and one for each choice."""
    chosen = Chosen()
    logging.getLogger("torch2ort").addHandler(chosen)
    ways = {"eager": training(model, given)}
    for way, options in (
        ("torch2ort", {}),
        ("torch2ort, autotuned", {"autotune": True, "log_level": "info"}),
    ):
        made = torch2ort.Options(**options)
        ways[way] = training(torch2ort.ORTModule(copy.deepcopy(model), options=made), given)
        ways[way]()
    logging.getLogger("torch2ort").removeHandler(chosen)
    logging.getLogger("torch2ort").setLevel(logging.WARNING)
    losses = {way: step() for way, step in ways.items()}
    for loss in losses.values():
        torch.testing.assert_close(loss, losses["eager"], rtol=1e-3, atol=1e-4)
    seconds = interleaved_medians(ways, rounds=40, clock=time.thread_time)
    ratios = [f"{way} {cost / seconds['eager']:.2f}" for way, cost in seconds.items() if way != "eager"]
    print(f"{name}, forward + backward, 1 thread, ratio to eager: {', '.join(ratios)}", flush=True)
    for choice in chosen.found:
        print(f"  {choice}", flush=True)


def main() -> None:
    """Print what was found for each model."""
    torch.set_num_threads(1)
    print(machine(), flush=True)
    for name, (kind, shape) in NETS.items():
        torch.manual_seed(0)
        compare(name, kind().train(), torch.randn(shape))
    for name, make in MODELS.items():
        compare(f"{name} {BATCH}x128, hidden 256, 4 layers", make(), batch(name, BATCH))


if __name__ == "__main__":
    main()
