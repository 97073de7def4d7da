"""A training step of a small BERT on ONNX Runtime, as ratios to eager PyTorch and to torch.compile."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from _timing import interleaved_medians
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import torch2ort

BATCH, LENGTH, HIDDEN, LAYERS = 8, 128, 256, 4


def tiny_bert() -> nn.Module:
    """Return a BERT of random weights. Without dropout, so that all ways must reach the same loss."""
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=1000,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=4 * HIDDEN,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config).train()


def training(module: nn.Module, tokens: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    """Return a training step of `module`, which returns its loss."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = module(input_ids=tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def main() -> None:
    """Check that all ways agree, time them, and print one line."""
    torch.set_num_threads(1)
    model = tiny_bert()
    tokens = torch.randint(1000, (BATCH, LENGTH))
    labels = torch.randint(2, (BATCH,))
    modules = {
        "ort": torch2ort.ORTModule(copy.deepcopy(model)),
        "compile": torch.compile(copy.deepcopy(model)),
        "eager": model,
    }
    ways = {name: training(module, tokens, labels) for name, module in modules.items()}
    for _ in range(3):
        losses = {name: way() for name, way in ways.items()}
        for name in ("ort", "compile"):
            torch.testing.assert_close(losses[name], losses["eager"], rtol=1e-4, atol=1e-5)
    seconds = interleaved_medians(ways, rounds=25, warm_up=0)
    print(
        f"BERT {BATCH}x{LENGTH}, hidden {HIDDEN}, {LAYERS} layers, AdamW step, 1 thread: "
        f"ORTModule {seconds['ort'] / seconds['eager']:.2f} of eager, "
        f"{seconds['ort'] / seconds['compile']:.2f} of torch.compile "
        f"(which is {seconds['compile'] / seconds['eager']:.2f} of eager)"
    )


if __name__ == "__main__":
    main()
