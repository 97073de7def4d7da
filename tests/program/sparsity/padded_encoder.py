"""A small encoder around a test's functions, its batches, and steps beside eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

import torch2ort
from tests.support.comparison import assert_same

WORDS, HIDDEN, HEADS, IGNORED = 19, 8, 2, -100
LENGTHS = (3, 7, 2, 5)
LENGTH = 9

Batch = dict[str, torch.Tensor]


def boolean(q, k, v, keep):
    """Compute attention to the tokens that a mask keeps."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None])


def of_tokens(model, x, keep, labels):
    """Return the loss of a label for each token."""
    return F.cross_entropy(model.head(x).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class Encoder(torch.nn.Module):
    """An embedding, one layer of attention, and a function of the hidden states.

    Args:
        end: gets the model, the hidden states, the mask and the labels; returns the outputs.
        attend: gets queries, keys, values and the mask.
        dropout: the share of hidden states that are dropped.
    """

    def __init__(
        self,
        end: Callable[..., Any] = of_tokens,
        attend: Callable[..., torch.Tensor] = boolean,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, HIDDEN)
        self.query, self.key, self.value = (torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.dropout = torch.nn.Dropout(dropout)
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, WORDS)
        self._attend, self._end = attend, end

    def encode(self, x, keep):
        layers = (self.query, self.key, self.value)
        q, k, v = (layer(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for layer in layers)
        return self.norm(x + self.dropout(self._attend(q, k, v, keep).transpose(1, 2).flatten(2)))

    def forward(self, ids, mask, labels):
        keep = mask.bool()
        return self._end(self, self.encode(self.words(ids), keep), keep, labels)


def batch(
    lengths: Sequence[int] = LENGTHS, length: int = LENGTH, *, labelled: int = 4, seed: int = 0
) -> Batch:
    """Return a batch with padding on the right.

    Args:
        lengths: of its sequences.
        length: of the longest one that it could contain.
        labelled: number of tokens of a sequence that have a label, if it is as long.
        seed: of its content.
    """
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.arange(length)
    mask = numbers < torch.tensor(lengths)[:, None]
    ids = torch.randint(1, WORDS, mask.shape, generator=generator).masked_fill(~mask, 0)
    labels = torch.randint(WORDS, mask.shape, generator=generator)
    labels = labels.masked_fill(~mask | (numbers >= labelled), IGNORED)
    return {"ids": ids, "mask": mask.long(), "labels": labels}


def share(lengths: Sequence[int] = LENGTHS, length: int = LENGTH) -> float:
    """Return the share of tokens that are no padding."""
    return sum(lengths) / (len(lengths) * length)


def wrap(model: torch.nn.Module, sparsity: str, **options: Any) -> torch2ort.ORTModule:
    """Return an ORTModule of a copy of a model."""
    options = {"cache_dir": False, **options}
    return torch2ort.ORTModule(copy.deepcopy(model), options=torch2ort.Options(sparsity=sparsity, **options))


def loss_of(output: Any) -> torch.Tensor:
    """Return a scalar that depends on all outputs."""
    outputs = output if isinstance(output, tuple) else (output,)
    return sum(value.square().sum() if value.dim() else value for value in outputs)


def assert_step_like_eager(
    eager: torch.nn.Module, module: torch.nn.Module, given: Batch, *, seed: int = 7
) -> Any:
    """Compare outputs, gradients and the state of the random numbers of one step; return its outputs."""
    found = []
    for model in (eager, module):
        model.zero_grad()
        torch.manual_seed(seed)
        output = model(**given)
        loss_of(output).backward()
        found.append((output, torch.get_rng_state()))
    (expected, state), (actual, other_state) = found
    assert_same(actual, expected, "outputs")
    assert_same_gradients(eager, module)
    assert torch.equal(state, other_state), "other random numbers were drawn"
    return actual


def assert_same_gradients(eager: torch.nn.Module, module: torch.nn.Module) -> None:
    """Compare the gradients of all parameters."""
    for (name, one), other in zip(eager.named_parameters(), module.parameters(), strict=True):
        assert_same(other.grad, one.grad, f"gradient of {name}")


def step(
    end: Callable[..., Any] = of_tokens,
    attend: Callable[..., torch.Tensor] = boolean,
    sparsity: str = "padding",
    given: Batch | None = None,
) -> torch2ort.ORTModule:
    """Run two steps of an encoder like eager PyTorch's, and return the module."""
    eager = Encoder(end, attend)
    module = wrap(eager, sparsity)
    for _ in range(2):  # the first one is compared with the dense step
        assert_step_like_eager(eager, module, batch() if given is None else given)
    return module
