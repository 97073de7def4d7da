"""Finetune a small language model with transformers.Trainer, in eager PyTorch and on ONNX Runtime.

The text is the Python standard library's own sources, a token a character. The feed-forward of each layer
of a Llama calls ``SwiGLU`` of ``char_model.py``. The run on ONNX Runtime has one line more.
Run it with ``python examples/finetune_with_trainer.py``; ``--help`` lists the settings. It prints:

    Loss: 4.6698 to 2.4057. Largest difference: 1.2e-06
    Loss plot: finetune_with_trainer.png
"""

from __future__ import annotations

import copy
import tempfile
from argparse import Namespace
from pathlib import Path

import torch
import transformers
from char_model import SwiGLU
from shared import batches, save_plot, settings, standard_library_text
from torch import Tensor, nn

import torch2ort


class FeedForward(nn.Module):
    """The feed-forward of a Llama layer, with ``SwiGLU`` as its gate and the weights of `other`."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = other.gate_proj, other.up_proj, other.down_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(SwiGLU.apply(self.gate_proj(x), self.up_proj(x)))


def language_model(kinds: int, width: int, layers: int) -> nn.Module:
    """Return a Llama of random weights for `kinds` tokens."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    config = transformers.LlamaConfig(vocab_size=kinds, num_attention_heads=4, use_cache=False, **sizes)
    model = transformers.LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp = FeedForward(layer.mlp)
    return model


def train(model: nn.Module, rows: list[dict[str, Tensor]], options: Namespace) -> list[float]:
    """Return the losses of the steps."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=rows)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    options = settings(__doc__, steps=100, batch=8, length=64, width=64, layers=2, output=Path())
    text = standard_library_text(500_000)
    (tokens,) = batches(text, options.steps * options.batch, options.length, 1)
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    torch.manual_seed(1)
    model = language_model(len(set(text)), options.width, options.layers)
    module = torch2ort.ORTModule(copy.deepcopy(model))
    eager, ort = train(model, rows, options), train(module, rows, options)
    worst = max(abs(a - b) for a, b in zip(eager, ort, strict=True))
    print(f"Loss: {eager[0]:.4f} to {eager[-1]:.4f}. Largest difference: {worst:.1e}")
    save_plot(options.output / "finetune_with_trainer.png", eager, ort)
