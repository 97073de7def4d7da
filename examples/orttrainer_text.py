"""Train a character model with ORTTrainer's documented interface, resume it, and generate text with its file.

Weights are updated every second call, at a rate that warms up. In the middle the training stops at a
checkpoint, and resumes in a new trainer. At the end plain ONNX Runtime generates text with the saved file.
Run it with ``python examples/orttrainer_text.py``; ``--help`` lists the settings. It prints:

    Loss 4.587 -> 1.642 in 1200 calls.
    orttrainer_text.onnx writes: p setiontext is not er of not self = and is self._don thall -e ans ...
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from matplotlib.figure import Figure
from shared import batches, progress_bar, settings, standard_library_text
from torch import nn

from torch2ort.trainer import ORTTrainer, ORTTrainerOptions, optim


def make_trainer(symbols: int, arguments: Namespace) -> ORTTrainer:
    """Return a trainer of a model that predicts the next of `symbols` characters from the last ones."""
    torch.manual_seed(1)
    width = arguments.context * arguments.width
    embedding = nn.Sequential(nn.Embedding(symbols, arguments.width), nn.Flatten(), nn.LayerNorm(width))
    head = nn.Sequential(nn.Linear(width, 200), nn.GELU(), nn.Linear(200, symbols))
    description = {
        "inputs": [("input", ["batch", arguments.context]), ("label", ["batch"])],
        "outputs": [("loss", [], True), ("logits", ["batch", symbols])],
    }
    options = {
        "device": {"id": "cpu"},
        "batch": {"gradient_accumulation_steps": 2},
        "lr_scheduler": optim.lr_scheduler.CosineWarmupLRScheduler(arguments.steps // 2, warmup=0.1),
    }
    model, adam = nn.Sequential(embedding, head), optim.AdamConfig(lr=3e-3, lambda_coef=0.01)
    return ORTTrainer(model, description, adam, nn.functional.cross_entropy, ORTTrainerOptions(options))


def write(path: Path, start: str, alphabet: list[str], length: int) -> str:
    """Return `length` characters after `start`, drawn from the ONNX model's probabilities."""
    session = onnxruntime.InferenceSession(path)
    text = start
    for _ in range(length):
        tokens = np.array([[alphabet.index(symbol) for symbol in text[-len(start) :]]])
        # The file also computes the loss, and so needs a label.
        (logits,) = session.run(["logits"], {"input": tokens, "label": np.zeros(1, np.int64)})
        text += alphabet[torch.multinomial(torch.from_numpy(2 * logits).softmax(-1), 1)]
    return text[-length:]


if __name__ == "__main__":
    arguments = settings(__doc__, steps=1200, batch=64, context=16, width=48, output=Path())
    text = standard_library_text(500_000)
    alphabet, losses = sorted(set(text)), []
    work = list(batches(text, arguments.batch, arguments.context + 1, arguments.steps))
    path = arguments.output / "orttrainer_text.checkpoint"
    path.unlink(missing_ok=True)
    trainer = make_trainer(len(alphabet), arguments)
    with progress_bar() as progress:
        for number, window in enumerate(progress.track(work, description="")):
            if number == len(work) // 2:
                trainer.save_checkpoint(path, {"losses": losses})
                trainer = make_trainer(len(alphabet), arguments)
                losses = trainer.load_checkpoint(path)["losses"]
            loss, _ = trainer.train_step(window[:, :-1], window[:, -1])
            losses.append(loss.item())
    print(f"Loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} calls.")
    figure = Figure()
    figure.subplots().plot(losses)
    figure.savefig(path.with_suffix(".png"))
    model = path.with_suffix(".onnx")
    trainer.save_as_onnx(str(model))
    print(f"{model} writes: {write(model, text[: arguments.context], alphabet, 200)}")
