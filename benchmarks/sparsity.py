"""Training steps that leave out padding, ignored labels and unread tokens, as ratios to the dense step.

A step is forward and backward of a model that returns its loss alone, with ``sparsity="auto"``; the dense
step has ``sparsity="off"``. Names of tables as arguments select tables. ``--dropout 0.1`` adds dropout.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from _machine import machine
from _timing import interleaved_medians
from torch import Tensor, nn

import torch2ort

BATCH, LENGTH, HIDDEN, LAYERS, HEADS = 8, 128, 128, 4, 4
SMALL, LARGE = 1_000, 8_000
SHARES = (0.0, 0.15, 0.5, 0.85)
IGNORED = -100
# Lengths of a batch are at most this far from their mean.
SPREAD = 8
BATCHES = 4
WAYS = {name: torch2ort.Options(sparsity=name) for name in ("auto", "off")}


class LossAlone(nn.Module):
    """A model of transformers that returns its loss alone, so that nothing reads its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        return self.model(**batch).loss


def bert(vocabulary: int, dropout: float, kind: type = transformers.BertForMaskedLM) -> nn.Module:
    config = kind.config_class(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN,
        max_position_embeddings=LENGTH + 2,  # RoBERTa's first position is 2
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return LossAlone(kind(config))


def roberta(vocabulary: int, dropout: float) -> nn.Module:
    return bert(vocabulary, dropout, transformers.RobertaForSequenceClassification)


def gpt2(vocabulary: int, dropout: float) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=LENGTH,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        n_inner=4 * HIDDEN,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return LossAlone(model)


@dataclass(frozen=True)
class Table:
    """Rows of one model.

    Attributes:
        make: makes the model, of the size of the vocabulary and the dropout.
        vocabulary: the size of the vocabulary.
        targets: for a share of padding or of ignored labels, the largest ratio to the dense step.
        is_padded: True if the shares are of padding, False if they are of ignored labels.
        ignored: the share of ignored labels beside padding; ``None`` for a classifier of sequences.
    """

    make: Callable[[int, float], nn.Module]
    vocabulary: int
    targets: dict[float, float]
    is_padded: bool = True
    ignored: float | None = 0.0


OF_PADDING = {0.0: 1.02, 0.15: 0.93, 0.5: 0.62, 0.85: 0.35}
OF_LABELS = {0.0: 1.02, 0.85: 0.70}
TABLES = {
    "BERT, padding": Table(bert, SMALL, OF_PADDING),
    "BERT, padding and 85 % ignored labels": Table(bert, SMALL, OF_PADDING, ignored=0.85),
    "GPT-2, padding": Table(gpt2, SMALL, OF_PADDING),
    "BERT, ignored labels": Table(bert, LARGE, OF_LABELS, is_padded=False),
    "GPT-2, ignored labels": Table(gpt2, LARGE, OF_LABELS, is_padded=False),
    "RoBERTa's classifier, unread tokens": Table(roberta, SMALL, {0.0: 0.90}, ignored=None),
}


def batches(table: Table, share: float) -> Iterator[dict[str, Tensor]]:
    """Yield batches of different lengths and labels, in turns, whose mean share is `share`."""
    torch.manual_seed(0)
    found = []
    mean = LENGTH - round(share * LENGTH) if table.is_padded else LENGTH
    spread = min(SPREAD, LENGTH - mean)
    for _ in range(BATCHES):
        lengths = torch.linspace(mean - spread, mean + spread, BATCH).round()[torch.randperm(BATCH)]
        lengths[: BATCH // 2] += torch.randint(-1, 2, (BATCH // 2,)) if spread else 0
        mask = torch.arange(LENGTH) < lengths.clamp(1, LENGTH)[:, None]
        tokens = torch.randint(2, table.vocabulary, (BATCH, LENGTH)).where(mask, 1)
        given = {"input_ids": tokens, "attention_mask": mask.long()}
        if table.ignored is None:
            labels = torch.randint(2, (BATCH,))
        else:
            ignored = table.ignored if table.is_padded else share
            is_kept = mask & (torch.rand(BATCH, LENGTH) >= ignored)
            labels = torch.randint(table.vocabulary, (BATCH, LENGTH)).where(is_kept, IGNORED)
        found.append({**given, "labels": labels})
    return itertools.cycle(found)


def step(module: nn.Module, data: Iterator[dict[str, Tensor]]) -> Callable[[], Tensor]:
    """Return a training step of `module`, which returns its loss."""

    def run() -> Tensor:
        module.zero_grad(set_to_none=True)
        loss = module(**next(data))
        loss.backward()
        return loss.detach()

    return run


def measure(table: Table, share: float, dropout: float, rounds: int) -> tuple[dict[str, float], str]:
    """Return the seconds of a step by its way, and the plan, after a check that all ways agree."""
    torch.manual_seed(1)
    model = table.make(table.vocabulary, dropout).train()
    modules: dict[str, Any] = {
        way: torch2ort.ORTModule(copy.deepcopy(model), options=options) for way, options in WAYS.items()
    }
    modules["eager"] = model
    ways = {way: step(module, batches(table, share)) for way, module in modules.items()}
    for i in range(2 * BATCHES):
        losses = {}
        for way, run in ways.items():
            torch.manual_seed(i)
            losses[way] = run()
        for way, module in modules.items():
            torch.testing.assert_close(losses[way], losses["eager"], rtol=1e-4, atol=1e-5)
            for (name, one), other in zip(module.named_parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5, msg=name)
    seconds = interleaved_medians(ways, rounds=rounds, warm_up=0, clock=time.thread_time)
    return seconds, modules["auto"].density["plan"]


def main() -> None:
    """Print one table per model and kind of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", help=f"among {'; '.join(TABLES)}; all by default")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=24)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine(), flush=True)
    print(
        f"Forward and backward, batch {BATCH}x{LENGTH}, hidden {HIDDEN}, {LAYERS} layers, "
        f"dropout {options.dropout:g}, 1 thread: steps with sparsity='auto'"
    )
    for name in options.tables or TABLES:
        table = TABLES[name]
        print(f"\n{name} (vocabulary {table.vocabulary})")
        print(f"{'share':>7} {'of dense':>9} {'target':>7} {'of eager':>9} {'dense of eager':>15}  plan")
        for share in SHARES if table.ignored is not None else SHARES[:1]:
            seconds, plan = measure(table, share, options.dropout, options.rounds)
            auto, dense, eager = seconds["auto"], seconds["off"], seconds["eager"]
            target = f"{table.targets[share]:.2f}" if share in table.targets else ""
            columns = f"{auto / dense:>9.2f} {target:>7} {auto / eager:>9.2f} {dense / eager:>15.2f}"
            print(f"{100 * share:>5.0f} % {columns}  {plan}", flush=True)


if __name__ == "__main__":
    main()
