"""Train a character model with ORTTrainer's documented interface, resume it, and generate text with its file.

The text is the Python standard library's own sources. Weights are updated every second call, at a rate that
warms up. In the middle the training stops at a checkpoint, and resumes in a new trainer. At the end the model
is an ONNX file, with which plain ONNX Runtime generates some text.

It takes less than a minute: ``python examples/orttrainer_text.py``; ``--help`` lists the settings.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from torch2ort.trainer import ORTTrainer, ORTTrainerOptions, optim

ACCUMULATED = 2  # calls between two updates


class Characters(nn.Module):
    """Predicts the next character from the last ones.

    Args:
        symbols: Number of different characters.
        context: Number of characters that the model reads at once.
        width: Size of a character's vector.
    """

    def __init__(self, symbols: int, context: int, width: int) -> None:
        super().__init__()
        self.character = nn.Embedding(symbols, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        self.norm = nn.LayerNorm(context * width)
        self.hidden = nn.Linear(context * width, 4 * width)
        self.head = nn.Linear(4 * width, symbols)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, symbols) for tokens (batch, context)."""
        x = (self.character(tokens) + self.position).flatten(1)
        return self.head(F.gelu(self.hidden(self.norm(x))))


def standard_library_text(characters: int) -> str:
    """Return the first `characters` ASCII characters of the standard library's sources, by file name."""
    text = ""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="ignore").encode("ascii", "ignore").decode()
        if len(text) >= characters:
            break
    return text[:characters]


def batches(data: Tensor, batch: int, context: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `steps` pairs of characters, int64 (batch, context), and the next character of each, (batch)."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(data) - context, (batch, 1), generator=generator)
        yield data[starts + torch.arange(context)], data[starts[:, 0] + context]


def make_trainer(model: nn.Module, context: int, symbols: int, steps: int, rate: float) -> ORTTrainer:
    """Return a trainer of `model` for `steps` calls."""
    description = {
        "inputs": [("tokens", ["batch", context]), ("label", ["batch"])],
        "outputs": [("loss", [], True), ("logits", ["batch", symbols])],
    }
    schedule = optim.lr_scheduler.CosineWarmupLRScheduler(max(1, steps // ACCUMULATED), warmup=0.1)
    options = ORTTrainerOptions(
        {
            "device": {"id": "cpu"},
            "batch": {"gradient_accumulation_steps": ACCUMULATED},
            "lr_scheduler": schedule,
            "debug": {"check_model_export": True},
        }
    )
    # The norm of the gradients is limited to 1, as in the reference.
    config = optim.AdamConfig(lr=rate, lambda_coef=0.01)
    return ORTTrainer(model, description, config, F.cross_entropy, options)


def train(
    trainer: ORTTrainer, data: list[tuple[Tensor, Tensor]], progress: Progress, losses: list[float]
) -> None:
    """Train on each batch, and record the loss."""
    for tokens, label in data:
        loss, _ = trainer.train_step(tokens, label)
        losses.append(loss.item())
        (rate,) = trainer.options.lr_scheduler.get_last_lr()
        progress.update(
            progress.task_ids[0], advance=1, description=f"loss {losses[-1]:.3f}, rate {rate:.1e}"
        )


def write(path: Path, start: str, alphabet: list[str], context: int, length: int) -> str:
    """Return `length` characters after `start`, drawn from the ONNX model's probabilities."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    generator = np.random.default_rng(1)
    text = start.rjust(context)
    for _ in range(length):
        tokens = np.array([[alphabet.index(symbol) for symbol in text[-context:]]])
        # The file also computes the loss, and so needs a label.
        (logits,) = session.run(["logits"], {"tokens": tokens, "label": np.zeros(1, np.int64)})
        chances = np.exp(logits[0].astype(np.float64) / 0.5)
        text += alphabet[generator.choice(len(alphabet), p=chances / chances.sum())]
    return text[-length:]


def save_plot(losses: list[float], resumed: int, path: Path) -> None:
    """Plot the losses, their running mean, and the step where the training was resumed."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(losses, linewidth=0.5, alpha=0.5, label="each call")
    window = min(25, len(losses))
    smooth = np.convolve(losses, np.ones(window) / window, "valid")
    axes.plot(range(window - 1, len(losses)), smooth, color="black", label=f"mean of {window}")
    axes.axvline(resumed, linestyle="--", color="grey", label="resumed from its checkpoint")
    axes.set_xlabel("call of train_step")
    axes.set_ylabel("loss (nats per character)")
    axes.legend()
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    """Return the settings of a run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1200, help="calls of train_step (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="samples in a call (default: %(default)s)")
    parser.add_argument("--context", type=int, default=16, help="characters seen (default: %(default)s)")
    parser.add_argument(
        "--width", type=int, default=48, help="of a character's vector (default: %(default)s)"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="of Adam (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path(), help="folder of what is written (default: here)"
    )
    return parser.parse_args()


def main() -> None:
    """Train, stop, resume, save, generate."""
    arguments = parse_arguments()
    console = Console()
    text = standard_library_text(500_000)
    alphabet = sorted(set(text))
    data = torch.tensor([alphabet.index(symbol) for symbol in text])
    torch.manual_seed(1)
    sizes = (len(alphabet), arguments.context, arguments.width)
    work = list(batches(data, arguments.batch, arguments.context, arguments.steps))
    half, losses = len(work) // 2, []
    settings = (arguments.context, len(alphabet), arguments.steps, arguments.learning_rate)
    checkpoint = arguments.output / "orttrainer_text.checkpoint"
    checkpoint.unlink(missing_ok=True)

    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        progress.add_task("", total=len(work))
        first = make_trainer(Characters(*sizes), *settings)
        train(first, work[:half], progress, losses)
        first.save_checkpoint(checkpoint, {"losses": losses})
        second = make_trainer(Characters(*sizes), *settings)
        losses = second.load_checkpoint(checkpoint)["losses"]
        train(second, work[half:], progress, losses)
    console.print(
        f"Loss {losses[0]:.3f} -> {sum(losses[-20:]) / len(losses[-20:]):.3f} in {len(losses)} calls."
    )

    path = arguments.output / "orttrainer_text.onnx"
    second.save_as_onnx(str(path))
    console.print(f"{path} writes:")
    console.print(write(path, "import os\n\ndef ", alphabet, arguments.context, 200), markup=False)
    plot = arguments.output / "orttrainer_text.png"
    save_plot(losses, half, plot)
    console.print(f"Loss plot: {plot}")


if __name__ == "__main__":
    main()
