"""Train a masked language model on padded batches, in eager PyTorch and on ONNX Runtime.

Batches of lines of the standard library are padded. The model returns its loss alone, so steps on ONNX
Runtime leave out padding and ignored labels. Run it with ``python examples/padded_batches.py``. It prints:

    Loss: 4.8145 to 3.3149. Largest difference: 9.5e-07
    Second epoch: 5.2 s in eager PyTorch, 3.9 s on ONNX Runtime
    tokens ▅▄▄▅▅▅▄▅▅▅▅▅▄▅▄▄▄▄▄▄▄▅▅▅▅▄▄▅▅▅▄▅▄▅▅▅▄▄▅▄ 51%
    labels ▂▁▂▂▂▂▂▂▂▂▂▂▁▂▁▂▂▁▁▁▂▂▂▂▂▂▂▂▂▂▁▂▁▂▂▂▂▁▂▂ 8%
"""

from __future__ import annotations

import copy
import tempfile
import time

import torch
import transformers
from shared import settings, standard_library_text
from torch import Tensor, nn

import torch2ort


class LossAlone(transformers.BertForMaskedLM):
    """A BERT that returns its loss alone."""

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        return {"loss": super().forward(**batch).loss}


class Watch(transformers.TrainerCallback):
    """A callback that adds the time and the density of each step to the trainer's log."""

    def on_log(self, *given: object, model: nn.Module, **_: object) -> None:
        given[1].log_history[-1].update(time=time.perf_counter(), **getattr(model, "density", {}))


def collate(rows: list[Tensor]) -> dict[str, Tensor]:
    """Return a batch padded by 0, in which 1 hides a part of the tokens; the others' labels are ignored."""
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    is_hidden = (tokens > 0) & (torch.rand(tokens.shape) < 0.15)
    labels, mask = tokens.where(is_hidden, -100), (tokens > 0).long()
    return {"input_ids": tokens.where(~is_hidden, 1), "attention_mask": mask, "labels": labels}


def train(model: nn.Module, rows: list[Tensor], batch: int) -> list[dict]:
    """Return the loss, the time and the density of each step of two epochs."""
    flags = dict.fromkeys(("use_cpu", "disable_tqdm", "dataloader_drop_last"), True)
    flags |= {"remove_unused_columns": False, "save_strategy": "no", "logging_steps": 1}
    sizes = {"num_train_epochs": 2, "per_device_train_batch_size": batch, "learning_rate": 1e-3}
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(folder, **flags, **sizes)
        trainer = transformers.Trainer(model, arguments, collate, rows, callbacks=[Watch()])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    options = settings(__doc__, characters=16_000, batch=16, width=128, layers=4)
    lines = standard_library_text(options.characters).encode().splitlines()
    rows = [torch.tensor([*line[:128]]) for line in lines if line]
    sizes = {"hidden_size": options.width, "intermediate_size": 4 * options.width, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=128, num_hidden_layers=options.layers, **sizes)
    torch.manual_seed(1)
    torch.set_num_threads(1)  # more threads have little to do in a model of this size
    model = LossAlone(config)
    module = torch2ort.ORTModule(copy.deepcopy(model))
    eager, ort = (train(each, rows, options.batch) for each in (model, module))
    worst = max(abs(one["loss"] - other["loss"]) for one, other in zip(eager, ort, strict=True))
    print(f"Loss: {ort[0]['loss']:.4f} to {ort[-1]['loss']:.4f}. Largest difference: {worst:.1e}")
    seconds = [steps[-1]["time"] - steps[len(steps) // 2 - 1]["time"] for steps in (eager, ort)]
    print(f"Second epoch: {seconds[0]:.1f} s in eager PyTorch, {seconds[1]:.1f} s on ONNX Runtime")
    for kind in ("tokens", "labels"):
        shares = [step[kind] for step in ort][-40:]
        bars = "".join("▁▂▃▄▅▆▇█"[round(7 * share)] for share in shares)
        print(f"{kind} {bars} {sum(shares) / len(shares):.0%}")
