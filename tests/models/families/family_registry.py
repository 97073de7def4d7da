"""Families of models: their class, and the table that the modules beside this one fill.

An entry makes a tiny net of random weights, and batches of two sizes. ``refused`` is the whole message of
the refusal, with ``...`` in place of the model's source line or torch's own message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

READS = (
    "{}: the model's Python code depends on a value inside a tensor at ..., so one graph is not valid for "
    "every input (...). {}"
)
TRACED = (
    "{}: forward raises {} at ... while torch.export traces it, and not in eager PyTorch (...). Code that "
    "asks whether it is compiled does something else then: pass the arguments that it makes itself in eager "
    "PyTorch, such as a mask, or put that part of the model into a torch.autograd.Function"
)
BRANCHES = (
    "Use torch.where instead of the branch, or move the code into an autograd.Function. "
    "torch.compile(model, backend='torch2ort') runs such code unchanged, in several graphs"
)
READS_LABELS = "It looks at the labels. Call the model without them, and compute the loss from its outputs"
LEAVES_OUT_LAYERS = "It leaves out layers at random. Set the layerdrop of the model's configuration to 0"

Batch = dict[str, Any] | tuple[Any, ...]
Make = Callable[[], tuple[torch.nn.Module, Sequence[Batch]]]


@dataclass(frozen=True)
class Family:
    name: str
    make: Make
    refused: str | None = None
    warns: str | None = None


FAMILIES: dict[str, Family] = {}


def family(name: str, *, refused: str | None = None, warns: str | None = None) -> Callable[[Make], Make]:
    def add(make: Make) -> Make:
        known = FAMILIES.get(name)
        # pytest imports each module once more, for its doctests.
        assert known is None or known.make.__code__.co_filename == make.__code__.co_filename, name
        FAMILIES[name] = Family(name, make, refused, warns)
        return make

    return add


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, 50, (batch, length))
