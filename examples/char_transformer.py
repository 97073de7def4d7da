"""Train a character transformer in eager PyTorch and on ONNX Runtime, side by side from the same weights.

The text is the Python standard library's own sources. Two custom autograd Functions are in the model:
the attention weights come from ``entmax`` (a library from PyPI, used as it is), and the feed-forward
uses :class:`SwiGLU` below, with a backward written by hand. Neither needs to be registered with torch2ort.

Run it with ``python examples/char_transformer.py``; ``--help`` lists the settings.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import onnxruntime
import torch
import torch.nn.functional as F
from entmax import entmax15
from entmax.activations import Entmax15Function
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import torch2ort

Batch = tuple[Tensor, Tensor]

HIDDEN = -1e4  # score of a later character; exp(-1e4) is 0, and entmax's squares of it are finite in float32


class SwiGLU(torch.autograd.Function):
    """``silu(gate) * value`` that saves only its inputs and recomputes the sigmoid in backward."""

    @staticmethod
    def forward(ctx, gate: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(gate, value)
        return F.silu(gate) * value

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, value = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        return grad * value * (sigmoid + silu * (1 - sigmoid)), grad * silu


class Block(nn.Module):
    """Pre-norm transformer block: sparse causal attention, then a gated feed-forward."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm_feed_forward = nn.LayerNorm(width)
        self.gate_and_value = nn.Linear(width, 4 * width)
        self.down = nn.Linear(2 * width, width)
        later = torch.ones(context, context, dtype=torch.bool).triu(1)
        self.register_buffer("later", later, persistent=False)

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        parts = self.query_key_value(x).chunk(3, -1)
        query, key, value = (part.reshape(shape).transpose(1, 2) for part in parts)
        scores = query @ key.transpose(-2, -1) / math.sqrt(shape[-1])
        weights = entmax15(scores.masked_fill(self.later[:length, :length], HIDDEN), dim=-1)
        return self.mix((weights @ value).transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_attention(x))
        gate, value = self.gate_and_value(self.norm_feed_forward(x)).chunk(2, -1)
        return x + self.down(SwiGLU.apply(gate, value))


class CharTransformer(nn.Module):
    """Predicts the next character.

    Args:
        symbols: Number of different characters.
        context: Length of the longest sequence.
        width: Size of a character's vector.
        layers: Number of blocks.
        heads: Attention heads; divides ``width``.
    """

    def __init__(self, symbols: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.character = nn.Embedding(symbols, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, context) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits (batch, length, symbols), or with `targets` (batch, length) the mean loss."""
        x = self.character(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def standard_library_text(characters: int) -> str:
    """Return the first `characters` ASCII characters of the standard library's sources, by file name."""
    text = ""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="ignore").encode("ascii", "ignore").decode()
        if len(text) >= characters:
            break
    return text[:characters]


def batches(text: str, batch: int, context: int, steps: int) -> Iterator[Batch]:
    """Yield `steps` pairs of characters and next characters, int64 (batch, context)."""
    index = {symbol: i for i, symbol in enumerate(sorted(set(text)))}
    data = torch.tensor([index[symbol] for symbol in text])
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(data) - context, (batch, 1), generator=generator)
        window = data[starts + torch.arange(context + 1)]
        yield window[:, :-1], window[:, 1:]


@dataclass
class Training:
    """One way to train: its losses and the seconds of each step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    autocast: bool = False
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss = self.model(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())


def train_side_by_side(eager: Training, ort: Training, data: Iterator[Batch], steps: int) -> None:
    """Train both on each of `steps` batches; each of the two is first in every second step."""
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}")) as progress:
        task = progress.add_task("", total=steps)
        for number, (tokens, targets) in enumerate(data):
            for training in (eager, ort) if number % 2 else (ort, eager):
                training.step(tokens, targets)
            losses = f"eager {eager.losses[-1]:.4f}, ORT {ort.losses[-1]:.4f}"
            progress.update(task, advance=1, description=losses)


def loss_table(eager: list[float], ort: list[float], rows: int = 10) -> Table:
    """Return about `rows` evenly spaced steps, the first and the last among them."""
    table = Table("step", "eager loss", "ORT loss", "difference", title="Two trainings from one start")
    for column in table.columns:
        column.justify = "right"
    last = len(eager) - 1
    for step in sorted({round(last * row / max(rows - 1, 1)) for row in range(rows)}):
        difference = ort[step] - eager[step]
        table.add_row(str(step + 1), f"{eager[step]:.6f}", f"{ort[step]:.6f}", f"{difference:+.1e}")
    return table


def save_plot(eager: list[float], ort: list[float], path: Path) -> None:
    """Draw both losses over each other, and their distance below."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    losses, distance = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    steps = range(1, len(eager) + 1)
    losses.plot(steps, eager, linewidth=3, alpha=0.4, label="eager PyTorch")
    losses.plot(steps, ort, linewidth=1, linestyle="--", color="black", label="ONNX Runtime")
    losses.set_ylabel("loss (nats per character)")
    losses.legend()
    # A difference of 0 has no logarithm; it is drawn as the smallest difference of a float32 near 1.
    differences = [max(abs(a - b), 2**-24) for a, b in zip(eager, ort, strict=True)]
    distance.semilogy(steps, differences, ".", markersize=3)
    distance.set_ylabel("|difference|")
    distance.set_xlabel("step")
    figure.savefig(path, dpi=120)


def export_and_reload(model: nn.Module, tokens: Tensor, path: Path) -> tuple[torch2ort.ExportedModel, float]:
    """Write the trained model to `path`, load it again, and compare it with `model` on other batch sizes.

    Returns:
        The reloaded model, and the largest absolute difference of a logit.

    Raises:
        AssertionError: The reloaded model's logits differ from eager's.
    """
    model.eval()
    torch2ort.export(model, tokens, dynamic_shapes={"tokens": {0: torch.export.Dim("batch")}}).save(path)
    reloaded = torch2ort.load(path, functions=[SwiGLU, Entmax15Function])
    worst = 0.0
    for rows in (1, 3, len(tokens)):
        with torch.no_grad():
            expected = model(tokens[:rows])
        given = reloaded(tokens[:rows])
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)
        worst = max(worst, (given - expected).abs().max().item())
    return reloaded, worst


def serve(path: Path, model: nn.Module, tokens: Tensor) -> float:
    """Run the file in a plain onnxruntime session, as a server does, and compare it with `model`.

    Returns:
        The largest absolute difference of a logit.

    Raises:
        AssertionError: The served logits differ from eager's.
    """
    for function in (SwiGLU, Entmax15Function):
        torch2ort.register_function(function)
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(torch2ort.custom_ops_library_path())
    session = onnxruntime.InferenceSession(str(path), options)
    (logits,) = session.run(None, {session.get_inputs()[0].name: tokens.numpy()})
    with torch.no_grad():
        expected = model(tokens)
    served = torch.from_numpy(logits)
    torch.testing.assert_close(served, expected, rtol=1e-4, atol=1e-4)
    return (served - expected).abs().max().item()


def parse_arguments() -> argparse.Namespace:
    """Return the settings of a run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    setting: Callable[..., argparse.Action] = parser.add_argument
    setting("--steps", type=int, default=600, help="training steps (default: %(default)s)")
    setting("--batch", type=int, default=16, help="sequences in a step (default: %(default)s)")
    setting("--context", type=int, default=64, help="characters in a sequence (default: %(default)s)")
    setting("--width", type=int, default=128, help="size of a character's vector (default: %(default)s)")
    setting("--layers", type=int, default=3, help="transformer blocks (default: %(default)s)")
    setting("--heads", type=int, default=4, help="attention heads (default: %(default)s)")
    setting("--threads", type=int, default=1, help="of each training (default: %(default)s)")
    setting("--learning-rate", type=float, default=1e-3, help="of AdamW (default: %(default)s)")
    setting("--autocast", action="store_true", help="train under torch.autocast in bfloat16")
    setting("--output", type=Path, default=Path(), help="folder of the plot and the model (default: here)")
    return parser.parse_args()


def main() -> None:
    """Train, compare, export, reload, serve, plot."""
    arguments = parse_arguments()
    console = Console()
    torch.set_num_threads(arguments.threads)  # ORTModule follows the mode of its model
    text = standard_library_text(1_000_000)
    torch.manual_seed(1)
    model = CharTransformer(
        len(set(text)), arguments.context, arguments.width, arguments.layers, arguments.heads
    )
    size = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"{size:,} parameters, {len(text):,} characters of {len(set(text))} kinds")

    def training(model: nn.Module) -> Training:
        optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
        return Training(model, optimizer, arguments.autocast)

    twin = copy.deepcopy(model)
    eager, ort = training(model), training(torch2ort.ORTModule(twin))
    data = batches(text, arguments.batch, arguments.context, arguments.steps)
    train_side_by_side(eager, ort, data, arguments.steps)
    console.print(loss_table(eager.losses, ort.losses))

    warm = min(10, arguments.steps - 1)
    eager_median, ort_median = (statistics.median(side.seconds[warm:]) for side in (eager, ort))
    console.print(
        f"Median step: eager {eager_median * 1e3:.1f} ms, ORT {ort_median * 1e3:.1f} ms, ratio "
        f"{ort_median / eager_median:.2f}. ORT's first step, with export and build: {ort.seconds[0]:.1f} s."
    )
    tokens, _ = next(batches(text, arguments.batch, arguments.context, 1))
    path = arguments.output / "char_transformer.onnx"
    reloaded, worst = export_and_reload(twin, tokens, path)
    console.print(f"Functions found in {path}:")
    for name in dict.fromkeys(site.func_name for site in reloaded.python_ops):
        calls = sum(site.func_name == name for site in reloaded.python_ops)
        console.print(f"  {name}, {calls} calls", highlight=False)
    console.print(f"Reloaded and run on three batch sizes: largest difference of a logit {worst:.1e}.")
    worst = serve(path, twin, tokens)
    console.print(f"Served by a plain onnxruntime session: largest difference of a logit {worst:.1e}.")
    plot = arguments.output / "char_transformer.png"
    save_plot(eager.losses, ort.losses, plot)
    console.print(f"Loss plot: {plot}")


if __name__ == "__main__":
    main()
