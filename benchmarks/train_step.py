"""Training steps of a small BERT and GPT-2 on ONNX Runtime, as ratios to eager PyTorch and torch.compile.

Behind each line stands whose matrix products these are, and what share of the step.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch
from _machine import machine
from _models import HIDDEN, LAYERS, LENGTH, MODELS, batch
from _products import said_of_products, share_in_eager, share_on_ort
from _timing import interleaved_medians
from torch import Tensor, nn

import torch2ort

BATCH = 8


def training(module: nn.Module, arguments: dict[str, Tensor]) -> Callable[[], Tensor]:
    """Return a training step of `module`, which returns its loss."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = module(**arguments).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def compare(name: str) -> None:
    """Check that all ways agree, time them, and print one line."""
    model, arguments = MODELS[name](), batch(name, BATCH)
    wrapped = torch2ort.ORTModule(copy.deepcopy(model))
    modules = {"torch2ort": wrapped, "compile": torch.compile(copy.deepcopy(model)), "eager": model}
    ways = {way: training(module, arguments) for way, module in modules.items()}
    for _ in range(3):
        losses = {way: step() for way, step in ways.items()}
        for loss in losses.values():
            torch.testing.assert_close(loss, losses["eager"], rtol=1e-4, atol=1e-5)
    seconds = interleaved_medians(ways, rounds=25, warm_up=0, clock=time.thread_time)
    ratio = seconds["torch2ort"] / seconds["eager"]
    print(
        f"{name} {BATCH}x{LENGTH}, hidden {HIDDEN}, {LAYERS} layers, AdamW step, 1 thread: torch2ort "
        f"{ratio:.2f} of eager, {seconds['torch2ort'] / seconds['compile']:.2f} of torch.compile "
        f"(which is {seconds['compile'] / seconds['eager']:.2f} of eager)",
        flush=True,
    )
    eager = share_in_eager(ways["eager"])
    print(said_of_products(ratio, eager, share_on_ort(wrapped, ways["torch2ort"])), flush=True)


def main() -> None:
    """Print one line a model."""
    torch.set_num_threads(1)
    print(machine(), flush=True)
    for name in MODELS:
        compare(name)


if __name__ == "__main__":
    main()
