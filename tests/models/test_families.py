"""Families of models train and are exported as in eager PyTorch, two sizes each, or are refused by name."""

from __future__ import annotations

import contextlib
import copy
import re
from typing import Any

import pytest
import torch

import torch2ort
from tests.models.families import FAMILIES
from tests.models.families.family_registry import Batch
from tests.support.comparison import assert_same, assert_trains_like_eager, tensors_of


def call(model: Any, batch: Batch) -> Any:
    torch.manual_seed(7)
    given = copy.deepcopy(batch)
    return model(**given) if isinstance(given, dict) else model(*given)


def loss_of(output: Any) -> torch.Tensor:
    """The model's own loss, or one of every tensor that it returns."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    return sum(t.square().mean() for t in tensors_of(output) if t.requires_grad)


# One family of each kind for `make test`; test_architectures.py has the transformers.
KINDS = frozenset({"actor_critic", "checked_distribution", "gcn", "glow", "neural_ode", "sparsemax", "unet"})
REFUSED_KINDS = frozenset(
    {"deberta_v2", "detr", "fourier", "ibert", "longformer", "longt5, no mask", "lstm_packed"}
    | {"switch_transformers", "wav2vec2_ctc"}
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in KINDS | REFUSED_KINDS else pytest.mark.long)
        for name in FAMILIES
    ],
)
@pytest.mark.usefixtures("checked_distributions")
def test_family(name):
    family = FAMILIES[name]
    torch.manual_seed(0)
    model, batches = family.make()
    if family.refused is not None:
        with pytest.raises(torch2ort.Torch2OrtError, match=pattern(family.refused)):
            call(torch2ort.ORTModule(model.train()), batches[0])
        return
    # Without an update in between: a difference of 1e-7 in a weight can turn a ReLU or a maximum over.
    assert_trains_like_eager(model.train(), batches, lr=0.0, steps=2, loss=loss_of)
    model.eval()
    with contextlib.ExitStack() as stack:
        if family.warns is not None:
            stack.enter_context(pytest.warns(torch2ort.Torch2OrtWarning, match=pattern(family.warns)))
        exported = torch2ort.export(copy.deepcopy(model), copy.deepcopy(batches[0]))
    with torch.no_grad():
        actual, expected = call(exported, batches[0]), call(model, batches[0])
    for i, (a, e) in enumerate(zip(tensors_of(actual), tensors_of(expected), strict=True)):
        assert_same(a, e, f"exported, output {i}")


def pattern(sentence: str) -> str:
    """A regular expression for the whole of ``sentence``, in which ``...`` matches any text."""
    return "^" + ".*".join(map(re.escape, sentence.split("..."))) + "$"


def test_the_table_has_sixty_families_that_work():
    assert sum(family.refused is None for family in FAMILIES.values()) >= 60
