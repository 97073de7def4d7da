"""Writes the training step that the page runs: a small net that classifies three kinds of drawings.

Afterwards: ``npm install``, ``npm start``, and http://localhost:8000/ in a browser.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import torch2ort
from torch2ort import optim

SIDE, KINDS, BATCH = 12, 3, 8


def make_model() -> nn.Module:
    """Return a convolution over the drawing, and two layers."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Unflatten(1, (1, SIDE, SIDE)),
        nn.Conv2d(1, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(6 * (SIDE // 2) ** 2, 24),
        nn.ReLU(),
        nn.Linear(24, KINDS),
    )


def write(folder: Path) -> None:
    """Export the step into a folder.

    Args:
        folder: folder for the files that the page requests.
    """
    sample = torch.rand(BATCH, SIDE * SIDE), torch.randint(KINDS, (BATCH,))
    artifacts = torch2ort.export_training(
        make_model(),
        sample,
        loss=nn.functional.cross_entropy,
        optimizer=optim.AdamW(lr=3e-3),
        metrics={"scores": lambda outputs, targets: outputs.softmax(1)},
    )
    artifacts.save(folder)


def main() -> None:
    """Write to ``step`` beside this file, or to the named folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "step")
    write(parser.parse_args().output)


if __name__ == "__main__":
    main()
