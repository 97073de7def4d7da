"""Draws models of padded batches, runs their training steps, and compares them with eager PyTorch's.

``python -m tests.random_programs.padded_models --seed 0 --programs 200`` prints the counts of models whose
steps leave out rows and of those that compute all, and each failure. One seed gives one model and its
batches.
"""

from __future__ import annotations

import argparse
import collections
import copy
import gc
import logging
import random
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import torch2ort
from tests.random_programs.padded_parts import (
    ATTENTIONS,
    CLASSES,
    EMBEDDINGS,
    ENDINGS,
    IGNORED,
    KEEPS,
    MISSES,
    PARTS,
    WHOLE_ENDINGS,
    WORDS,
    Batch,
    Layer,
)
from tests.support.comparison import assert_same
from torch2ort.program.sparsity import packing
from torch2ort.training import row_plans

LONGEST = 14
# Parts of records: of a step that differs, and of a program that cannot be packed.
UNUSED, UNPACKED = "is not used", "no step leaves out"


@dataclass(frozen=True)
class PaddedModel:
    """A model and the sizes of its batches.

    Attributes:
        seed: of weights, batches and dropout.
        inputs: names of ``EMBEDDINGS``, each added to the embedding of the tokens.
        has_padding_index: True if the embedding of the padding gets no gradient.
        keep: name of ``KEEPS``: the source of the mask.
        layers: for each layer, a name of ``ATTENTIONS`` or ``"encoder layer"``, and names of ``PARTS``.
        ending: name of ``ENDINGS``, or of ``WHOLE_ENDINGS``.
        miss: name of ``MISSES``, or empty.
        miss_after: number of layers before it.
        is_added: True for the input of the miss added to its result.
        is_left_padded: True if padding is at the begin of sequences.
        sizes: number of sequences, of tokens and of hidden features.
        sparsity: ``"padding"``, ``"labels"``, or ``"auto"`` at any size of the model.
    """

    seed: int
    inputs: tuple[str, ...]
    has_padding_index: bool
    keep: str
    layers: tuple[tuple[str, tuple[str, ...]], ...]
    ending: str
    miss: str
    miss_after: int
    is_added: bool
    is_left_padded: bool
    sizes: tuple[int, int, int]
    sparsity: str

    @property
    def reads_all(self) -> bool:
        """True if no step may leave out a row by ``sparsity="padding"``."""
        return self.sparsity == "padding" and not self.is_added and self.is_near_miss

    @property
    def is_near_miss(self) -> bool:
        """True if results depend on rows of padding."""
        return bool(self.miss) or self.ending in WHOLE_ENDINGS or any(n == "unmasked" for n, _ in self.layers)


def draw(seed: int) -> PaddedModel:
    """Draw a model.

    Args:
        seed: any number; three of eight numbers give a model whose results depend on rows of padding.
    """
    chosen = random.Random(seed)
    is_left = chosen.random() < 0.3
    names = [name for name in ATTENTIONS if name not in ("unmasked", "causal")]
    names += [] if is_left else ["causal"]
    layers = [
        (chosen.choice(names), tuple(chosen.choices([*PARTS], k=chosen.randint(1, 3))))
        for _ in range(chosen.randint(1, 3))
    ]
    if chosen.random() < 0.1:
        layers[chosen.randrange(len(layers))] = ("encoder layer", layers[0][1])
    # The first token of a sequence with padding on the left is padding.
    ending = chosen.choice([n for n in ENDINGS if not is_left or n not in ("first token", "two losses")])
    modes = ("padding", "padding", "labels", "auto")
    found: dict[str, Any] = {"miss": "", "miss_after": 0, "is_added": False, "sparsity": chosen.choice(modes)}
    if seed % 8 in (2, 5, 7):
        # Behind a mask, a part that reads all rows reads no row of padding.
        layers = [(kind, tuple(n for n in parts if n not in ("masked", "filled"))) for kind, parts in layers]
        number = seed // 8 * 3 + (2, 5, 7).index(seed % 8)
        miss = [*MISSES, *WHOLE_ENDINGS, "unmasked"][number % (len(MISSES) + len(WHOLE_ENDINGS) + 1)]
        found["sparsity"] = "padding" if chosen.random() < 0.85 else "auto"
        if miss in MISSES:
            found["miss"], found["miss_after"] = miss, chosen.randint(0, len(layers))
            found["is_added"] = chosen.random() < 0.15
        elif miss in WHOLE_ENDINGS:
            ending = miss
        else:
            place = chosen.randrange(len(layers))
            layers[place] = (miss, layers[place][1])
    return PaddedModel(
        seed=seed,
        inputs=tuple(name for name in EMBEDDINGS if chosen.random() < 0.4),
        has_padding_index=chosen.random() < 0.5,
        keep=chosen.choice([name for name in KEEPS if name != "lengths" or not is_left]),
        layers=tuple(layers),
        ending=ending,
        is_left_padded=is_left,
        sizes=(chosen.randint(3, 5), chosen.randint(6, LONGEST), chosen.choice((8, 12, 16))),
        **found,
    )


# --- the model


class Model(torch.nn.Module):
    """The model of a description."""

    def __init__(self, drawn: PaddedModel) -> None:
        super().__init__()
        _, length, hidden = drawn.sizes
        chosen = random.Random(f"model {drawn.seed}")
        self.words = torch.nn.Embedding(WORDS, hidden, padding_idx=0 if drawn.has_padding_index else None)
        self.table = torch.nn.Parameter(torch.randn(LONGEST, hidden) * 0.3)
        self.places, self.types = torch.nn.Embedding(LONGEST, hidden), torch.nn.Embedding(2, hidden)
        angles = torch.arange(LONGEST)[:, None] / 10 ** torch.linspace(0, 2, hidden // 2)
        self.register_buffer("sinusoids", torch.cat([angles.sin(), angles.cos()], -1)[None])
        self.layers = torch.nn.ModuleList(Layer(hidden, *layer, chosen) for layer in drawn.layers)
        self.head, self.short_head = torch.nn.Linear(hidden, WORDS), torch.nn.Linear(hidden, CLASSES)
        self._added = [EMBEDDINGS[name] for name in drawn.inputs]
        self._keep = KEEPS[drawn.keep]
        self._end = {**ENDINGS, **WHOLE_ENDINGS}[drawn.ending]
        self._place = drawn.miss_after if drawn.miss else None
        self.miss = MISSES[drawn.miss](hidden, length) if drawn.miss else None
        self._is_added = drawn.is_added

    def forward(self, ids, mask, lengths, labels, classes):
        keep = self._keep(ids, mask, lengths)
        x = self.words(ids)
        for embed in self._added:
            x = x + embed(self, ids, keep)
        for i, layer in enumerate(self.layers):
            x = self._missed(x) if i == self._place else x
            x = layer(x, keep)
        x = self._missed(x) if self._place == len(self.layers) else x
        return self._end(self, x, Batch(ids, keep, lengths, labels, classes))

    def _missed(self, x):
        return x + self.miss(x) if self._is_added else self.miss(x)


def batches(drawn: PaddedModel, count: int = 2) -> list[tuple[torch.Tensor, ...]]:
    """Return the inputs of steps, each with other lengths of sequences."""
    generator = torch.Generator().manual_seed(drawn.seed)
    found = []
    for _ in range(count):
        batch, length, _ = drawn.sizes
        lengths = torch.randint(1, length // 2 + 1, (batch,), generator=generator)
        lengths[:2] = torch.tensor([length - 1, 4])
        lengths = lengths[torch.randperm(batch, generator=generator)]
        mask = torch.arange(length)[None] < lengths[:, None]
        mask = mask.flip(1) if drawn.is_left_padded else mask
        ids = torch.randint(1, WORDS, (batch, length), generator=generator) * mask
        is_labelled = mask & (torch.rand(batch, length, generator=generator) < 0.8)
        is_labelled |= mask & (lengths == 4)[:, None]  # at least some
        labels = torch.randint(WORDS, (batch, length), generator=generator)
        labels = labels.masked_fill(~is_labelled, IGNORED)
        classes = torch.randint(CLASSES, (batch,), generator=generator)
        found.append((ids, mask.long(), lengths, labels, classes))
    return found


# --- the comparison


@dataclass(frozen=True)
class Outcome:
    """The result of a model's steps.

    Attributes:
        kind: ``"sparse"``, ``"dense"`` or ``"failed"``.
        reason: the difference, or the records about rows.
        plan: the plan of the last step.
    """

    kind: str
    reason: str
    plan: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


class _Records(logging.Handler):
    """Records of torch2ort."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.texts.append(record.getMessage())


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Collect the records of torch2ort from level INFO, and show none."""
    log, handler = logging.getLogger("torch2ort"), _Records()
    level, others, propagates = log.level, log.handlers[:], log.propagate
    log.handlers[:], log.propagate = [handler], False
    log.setLevel(logging.INFO)
    try:
        yield handler.texts
    finally:
        log.handlers[:], log.propagate = others, propagates
        log.setLevel(level)


@contextmanager
def any_size() -> Iterator[None]:
    """Let ``sparsity="auto"`` choose plans for small models, and attention be packed in them."""
    before = row_plans._SMALL, packing._FEWEST_PRODUCTS
    row_plans._SMALL, packing._FEWEST_PRODUCTS = 0.0, 0
    try:
        yield
    finally:
        row_plans._SMALL, packing._FEWEST_PRODUCTS = before


def run(drawn: PaddedModel) -> Outcome:
    """Run the steps of a model in eager PyTorch and on ONNX Runtime, and compare them."""
    torch.manual_seed(drawn.seed)
    eager = Model(drawn)
    options = torch2ort.Options(cache_dir=False, sparsity=drawn.sparsity)
    with recorded() as texts, any_size():
        module = torch2ort.ORTModule(copy.deepcopy(eager), options=options)
        try:
            for number, batch in enumerate(batches(drawn)):
                _compare(eager, module, batch, drawn.seed, f"step {number}")
        except Exception:
            return Outcome("failed", traceback.format_exc(limit=-3))
    unused = [text for text in texts if UNUSED in text]
    if unused:
        return Outcome("failed", unused[0])
    density = module.density
    # A forced plan for padding that leaves out no row computes what the dense step does.
    is_sparse = density["plan"] not in ("dense", "padding") or (
        density["plan"] == "padding" and density["tokens"] < 1
    )
    notes = [text for text in texts if " rows" in text or UNPACKED in text]
    return Outcome("sparse" if is_sparse else "dense", "\n".join(notes), density["plan"])


def _compare(
    eager: torch.nn.Module, module: torch.nn.Module, batch: Sequence[torch.Tensor], seed: int, what: str
) -> None:
    found = []
    for model in (eager, module):
        model.zero_grad()
        torch.manual_seed(seed + 1)
        outputs = model(*batch)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(output.square().mean() if output.dim() else output for output in outputs).backward()
        found.append((outputs, [p.grad for p in model.parameters()], torch.rand(1)))
    (expected, gradients, drawn), (actual, others, also_drawn) = found
    for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert bool(other.isfinite().all()), f"{what}: eager's output {i} is not finite"
        assert_same(one, other, f"{what}, output {i}")
    for (name, _), one, other in zip(eager.named_parameters(), others, gradients, strict=True):
        assert_same(one, other, f"{what}, gradient of {name}")
    for (name, one), other in zip(module.named_buffers(), eager.buffers(), strict=True):
        assert_same(one, other, f"{what}, buffer {name}")
    assert_same(also_drawn, drawn, f"{what}, random numbers afterwards", 0, 0)


def is_as_expected(drawn: PaddedModel, outcome: Outcome) -> bool:
    """Return False for a failure, and for a model that reads all rows and leaves out some."""
    return outcome.kind != "failed" and not (drawn.reads_all and outcome.kind == "sparse")


def count(seeds: Sequence[int], *, loud: bool = False) -> tuple[collections.Counter[str], list[str]]:
    """Run models.

    Args:
        seeds: their seeds.
        loud: whether each outcome is printed.

    Returns:
        The numbers of models by their outcomes, and the failures.
    """
    counts: collections.Counter[str] = collections.Counter()
    failures = []
    for seed in seeds:
        drawn = draw(seed)
        outcome = run(drawn)
        gc.collect()  # graphs are in reference cycles
        kind = "near miss" if drawn.is_near_miss else "padded"
        counts[f"{kind}, {outcome.kind}"] += 1
        counts["with a program that cannot be packed"] += UNPACKED in outcome.reason
        if not is_as_expected(drawn, outcome):
            failures.append(f"{drawn}\n{outcome}")
        if loud:
            print(f"{seed}: {kind}, {outcome.kind}, {outcome.plan}: {drawn}\n  {outcome.reason}", flush=True)
    return counts, failures


def main() -> int:
    """Run the models of the command line; return 1 if one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.random_programs.padded_models", description=__doc__
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first model; the next has the next")
    parser.add_argument("--programs", type=int, default=200, help="number of models")
    parser.add_argument("--loud", action="store_true", help="print each outcome")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    counts, failures = count(range(asked.seed, asked.seed + asked.programs), loud=asked.loud)
    print(*failures, sep="\n\n")
    print(*(f"{number} {kind}" for kind, number in sorted(counts.items())), sep="\n")
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
