"""Finetune a small language model with transformers.Trainer, in eager PyTorch and on ONNX Runtime.

The text is the Python standard library's own sources, a token a character. The feed-forward of each layer
calls :class:`SwiGLU`, an autograd Function with a backward written by hand, which stays a node of the graph.
Both runs start from the same weights and use the same batches; the run on ONNX Runtime has one line more.

Run it with ``python examples/finetune_with_trainer.py``; ``--help`` lists the settings.
"""

from __future__ import annotations

import argparse
import copy
import sysconfig
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from matplotlib.figure import Figure
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import torch2ort


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


class FeedForward(nn.Module):
    """The feed-forward of a Llama layer, with :class:`SwiGLU` as its gate and the weights of `other`."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = other.gate_proj, other.up_proj, other.down_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(SwiGLU.apply(self.gate_proj(x), self.up_proj(x)))


def characters(rows: int, length: int) -> tuple[list[dict[str, Tensor]], int]:
    """Return `rows` pieces of the standard library, tokens int64 (length,), and the number of kinds."""
    text = ""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="ignore").encode("ascii", "ignore").decode()
        if len(text) >= 500_000:
            break
    index = {symbol: i for i, symbol in enumerate(sorted(set(text)))}
    data = torch.tensor([index[symbol] for symbol in text])
    starts = torch.randint(len(data) - length, (rows,), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": data[s : s + length], "labels": data[s : s + length]} for s in starts], len(index)


def language_model(kinds: int, width: int, layers: int) -> nn.Module:
    """Return a Llama of random weights for `kinds` tokens."""
    config = transformers.LlamaConfig(
        vocab_size=kinds,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=256,
        use_cache=False,
    )
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp = FeedForward(layer.mlp)
    return model


class Bar(transformers.TrainerCallback):
    """Advances a line of a progress bar with each step."""

    def __init__(self, progress: Progress, name: str, steps: int) -> None:
        self._progress, self._name = progress, name
        self._task = progress.add_task(name, total=steps)

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "loss" in logs:
            text = f"{self._name}, loss {float(logs['loss']):.3f}"
            self._progress.update(self._task, completed=state.global_step, description=text)


def train(model: nn.Module, rows: list[dict[str, Tensor]], bar: Bar, settings: argparse.Namespace):
    """Return the losses of the steps, and the loss of an evaluation after the last."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=settings.steps,
            per_device_train_batch_size=settings.batch,
            per_device_eval_batch_size=settings.batch,
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=rows[settings.batch :],
            eval_dataset=rows[: settings.batch],
            callbacks=[bar],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
        return losses, trainer.evaluate()["eval_loss"]


def save_plot(eager: list[float], ort: list[float], path: Path) -> None:
    """Plot both losses in one diagram."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(eager) + 1), eager, linewidth=3, alpha=0.4, label="eager PyTorch")
    axes.plot(range(1, len(ort) + 1), ort, "--", linewidth=1, color="black", label="ONNX Runtime")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per character)")
    axes.legend()
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    """Return the settings of a run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="training steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="rows in a step (default: %(default)s)")
    parser.add_argument("--length", type=int, default=64, help="characters in a row (default: %(default)s)")
    parser.add_argument(
        "--width", type=int, default=64, help="size of a token's vector (default: %(default)s)"
    )
    parser.add_argument("--layers", type=int, default=2, help="layers (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path(), help="folder of the plot (default: here)")
    return parser.parse_args()


def main() -> None:
    """Train twice, compare, plot."""
    settings = parse_arguments()
    transformers.logging.set_verbosity_error()
    rows, kinds = characters((settings.steps + 1) * settings.batch, settings.length)
    eager = language_model(kinds, settings.width, settings.layers)
    ort = torch2ort.ORTModule(copy.deepcopy(eager))
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    found = []
    with Progress(*columns) as progress:
        for name, model in (("eager PyTorch", eager), ("ONNX Runtime", ort)):
            found.append(train(model, rows, Bar(progress, name, settings.steps), settings))
    (losses, evaluated), (ort_losses, ort_evaluated) = found
    worst = max(abs(a - b) for a, b in zip(losses, ort_losses, strict=True))
    print(f"Loss of step 1 and {settings.steps}: {losses[0]:.4f}, {losses[-1]:.4f}. ", end="")
    print(f"Largest difference: {worst:.1e}")
    print(f"Loss of other rows: eager {evaluated:.4f}, ONNX Runtime {ort_evaluated:.4f}")
    plot = settings.output / "finetune_with_trainer.png"
    save_plot(losses, ort_losses, plot)
    print(f"Loss plot: {plot}")


if __name__ == "__main__":
    main()
