"""Helpers of the longer examples: settings, text, a progress bar, and a plot of losses. It prints nothing."""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn


def settings(doc: str, **defaults: object) -> argparse.Namespace:
    """Return the settings of the command line: an option ``--name`` for each default, and `doc` as help."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    for name, default in defaults.items():
        kind = {"action": "store_true"} if default is False else {"type": type(default), "default": default}
        parser.add_argument(f"--{name}", help=f"default: {default}", **kind)
    return parser.parse_args()


def standard_library_text(characters: int) -> str:
    """Return the first `characters` ASCII characters of the standard library's sources, by file name."""
    text = ""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="ignore").encode("ascii", "ignore").decode()
        if len(text) >= characters:
            break
    return text[:characters]


def batches(text: str, batch: int, length: int, steps: int) -> Iterator[Tensor]:
    """Yield `steps` random pieces of `text` as positions in its alphabet, int64 (batch, length)."""
    index = {symbol: i for i, symbol in enumerate(sorted(set(text)))}
    data = torch.tensor([index[symbol] for symbol in text])
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(data) - length + 1, (batch, 1), generator=generator)
        yield data[starts + torch.arange(length)]


def train(model: nn.Module, data: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """Return the losses of a step for each input and target, of which `model` returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def progress_bar() -> Progress:
    """Return a progress bar that ends with the description of its task."""
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.description}"))


def save_plot(path: Path, eager: list[float], ort: list[float]) -> None:
    """Draw both losses over each other, and their distance below."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    losses, distance = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    steps = range(1, len(eager) + 1)
    losses.plot(steps, eager, linewidth=3, alpha=0.4, label="eager PyTorch")
    losses.plot(steps, ort, linewidth=1, linestyle="--", color="black", label="ONNX Runtime")
    losses.set_ylabel("loss")
    losses.legend()
    # A difference of 0 has no logarithm; it is drawn as the smallest difference of a float32 near 1.
    differences = [max(abs(a - b), 2**-24) for a, b in zip(eager, ort, strict=True)]
    distance.semilogy(steps, differences, ".", markersize=3)
    distance.set_ylabel("|difference|")
    distance.set_xlabel("step")
    figure.savefig(path, dpi=120)
    print(f"Loss plot: {path}")
