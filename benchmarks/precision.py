"""Training steps under torch.autocast in bfloat16, and of models in bfloat16, as ratios to eager's."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable

import torch
from _models import HIDDEN, LAYERS, LENGTH, MODELS, batch
from _timing import interleaved_medians
from torch import Tensor, nn

import torch2ort

BATCH = 8


def training(module: nn.Module, arguments: dict[str, Tensor], *, casts: bool) -> Callable[[], Tensor]:
    """Return a training step of `module`, which returns its loss."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if casts else contextlib.nullcontext():
            loss = module(**arguments).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def compare(name: str, *, casts: bool) -> None:
    """Check that both engines agree, time them, and print one line."""
    model, arguments = MODELS[name](), batch(name, BATCH)
    model = model if casts else model.bfloat16()
    wrapped = torch2ort.ORTModule(copy.deepcopy(model))
    ways = {
        way: training(module, arguments, casts=casts)
        for way, module in {"torch2ort": wrapped, "eager": model}.items()
    }
    for _ in range(3):
        losses = {way: step() for way, step in ways.items()}
        torch.testing.assert_close(losses["torch2ort"], losses["eager"], rtol=3e-2, atol=1e-2)
    seconds = interleaved_medians(ways, rounds=15, warm_up=0, clock=time.thread_time)
    how = "under autocast" if casts else "in bfloat16"
    print(
        f"{name} {BATCH}x{LENGTH}, hidden {HIDDEN}, {LAYERS} layers, {how}, AdamW step, 1 thread: torch2ort "
        f"{seconds['torch2ort'] / seconds['eager']:.2f} of eager",
        flush=True,
    )


def main() -> None:
    """Print two lines per model."""
    torch.set_num_threads(1)
    for name in MODELS:
        for casts in (True, False):
            compare(name, casts=casts)


if __name__ == "__main__":
    main()
