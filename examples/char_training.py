"""Two trainings step by step on the same batches, and a table of their losses, for char_transformer.py.

It prints a row for about ten of the steps, and the median duration of a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from shared import progress_bar
from torch import Tensor, nn


class Training:
    """One way to train: its losses and the seconds of each step."""

    def __init__(self, model: nn.Module, *, autocast: bool) -> None:
        self.model, self.autocast = model, autocast
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss = self.model(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())


def train_side_by_side(
    eager: nn.Module, ort: nn.Module, work: Sequence[Tensor], *, autocast: bool
) -> tuple[Training, Training]:
    """Train both on each batch of `work`, the first of them in turn, and print a table of the losses."""
    sides = Training(eager, autocast=autocast), Training(ort, autocast=autocast)
    with progress_bar() as progress:
        task = progress.add_task("", total=len(work))
        for number, window in enumerate(work):
            for side in sides if number % 2 else reversed(sides):
                side.step(window[:, :-1], window[:, 1:])
            losses = [side.losses[-1] for side in sides]
            progress.update(task, advance=1, description="eager {:.4f}, ORT {:.4f}".format(*losses))
    print_losses(*sides)
    return sides


def print_losses(eager: Training, ort: Training) -> None:
    """Print a table of about ten evenly spaced steps, and the median duration of a step."""
    table = Table("step", "eager loss", "ORT loss", "difference", title="Two trainings from one start")
    for column in table.columns:
        column.justify = "right"
    last = len(eager.losses) - 1
    for step in sorted({round(last * row / 9) for row in range(10)}):
        losses = eager.losses[step], ort.losses[step]
        table.add_row(str(step + 1), *(f"{loss:.6f}" for loss in losses), f"{losses[1] - losses[0]:+.1e}")
    Console().print(table)
    # The first ten steps are the warm-up.
    medians = [statistics.median(side.seconds[min(10, last) :]) for side in (eager, ort)]
    print(f"Median step: eager {medians[0] * 1e3:.1f} ms, ORT {medians[1] * 1e3:.1f} ms, ", end="")
    print(f"ratio {medians[1] / medians[0]:.2f}. ", end="")
    print(f"ORT's first step, with export and build: {ort.seconds[0]:.1f} s.")
