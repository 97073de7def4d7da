"""Parts of models of padded batches: masks, attention, layers and endings, and parts that read padding."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tests.support.functions import Centered

WORDS, CLASSES, HEADS = 23, 7, 2
IGNORED = -100

# --- inputs

Embedding = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


def _counted(model: Any, ids: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    numbers = (keep.long().cumsum(1) - 1).clamp(min=0)
    return model.places(numbers)


EMBEDDINGS: dict[str, Embedding] = {
    "parameter": lambda model, ids, keep: model.table[: ids.shape[1]],
    "arange": lambda model, ids, keep: model.places(torch.arange(ids.shape[1]))[None],
    "sinusoids": lambda model, ids, keep: model.sinusoids[:, : ids.shape[1]],
    "types": lambda model, ids, keep: model.types((ids > WORDS // 2).long()),
    "counted": _counted,
}
KEEPS: dict[str, Callable[..., torch.Tensor]] = {
    "mask": lambda ids, mask, lengths: mask.bool(),
    "equal": lambda ids, mask, lengths: mask == 1,
    "ids": lambda ids, mask, lengths: ids != 0,
    "lengths": lambda ids, mask, lengths: torch.arange(ids.shape[1])[None] < lengths[:, None],
}

# --- attention: each function gets queries, keys and values of all heads, the mask, and the share dropped

LOW = torch.finfo(torch.float32).min


def _causal(q: torch.Tensor) -> torch.Tensor:
    return torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()


def _fused(q, k, v, mask, p):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)


def _explicit(q, k, v, lower, p):
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return F.dropout(lower(scores).softmax(-1), p) @ v


def _added(keep, q, low):
    return (1.0 - keep[:, None, None].to(q.dtype)) * low


def _zeroed(q, k, v, keep, p):
    weights = (q @ k.transpose(2, 3)).masked_fill(~keep[:, None, None], -1e9).softmax(-1)
    return F.dropout(weights.masked_fill(~keep[:, None, None], 0.0), p) @ v


def _einsum(q, k, v, keep, p):
    scores = torch.einsum("bhqd,bhkd->bhqk", q * 0.3, k)
    weights = (scores + _added(keep, q, -10000.0)).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", F.dropout(weights, p), v)


ATTENTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "unmasked": lambda q, k, v, keep, p: _fused(q, k, v, None, p),
    "causal": lambda q, k, v, keep, p: F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True),
    "boolean": lambda q, k, v, keep, p: _fused(q, k, v, keep[:, None, None], p),
    "boolean, expanded": lambda q, k, v, keep, p: _fused(
        q, k, v, keep[:, None, None].expand(-1, 1, keep.shape[1], -1), p
    ),
    "boolean, causal": lambda q, k, v, keep, p: _fused(q, k, v, keep[:, None, None] & _causal(q), p),
    "added finfo.min": lambda q, k, v, keep, p: _fused(q, k, v, _added(keep, q, LOW), p),
    "added -10000": lambda q, k, v, keep, p: _explicit(q, k, v, lambda s: s + _added(keep, q, -10000.0), p),
    "added, causal": lambda q, k, v, keep, p: _fused(
        q,
        k,
        v,
        torch.zeros(q.shape[2], q.shape[2]).masked_fill(~_causal(q) | ~keep[:, None, None], LOW),
        p,
    ),
    "filled -inf": lambda q, k, v, keep, p: _explicit(
        q, k, v, lambda s: s.masked_fill(~keep[:, None, None], -torch.inf), p
    ),
    "filled -1e9": lambda q, k, v, keep, p: _explicit(
        q, k, v, lambda s: s.masked_fill(~keep[:, None, None], -1e9), p
    ),
    "filled, causal": lambda q, k, v, keep, p: _explicit(
        q, k, v, lambda s: s.masked_fill(~_causal(q), -1e9).masked_fill(~keep[:, None, None], -1e9), p
    ),
    "where": lambda q, k, v, keep, p: _explicit(
        q, k, v, lambda s: torch.where(keep[:, None, None], s, LOW), p
    ),
    "where, filled": lambda q, k, v, keep, p: _explicit(
        q, k, v, lambda s: torch.where(keep[:, None, None], s, torch.full([], LOW)), p
    ),
    "zeroed": _zeroed,
    "einsum": _einsum,
}


# Queries, keys and values: parts of one product, or three products.
FORMS = ("chunk", "unbind", "three")


class Attention(torch.nn.Module):
    """Attention of two heads, around a function of ``ATTENTIONS``."""

    def __init__(self, hidden: int, kind: str, form: str) -> None:
        super().__init__()
        self._attend, self._form = ATTENTIONS[kind], form
        self.qkv = torch.nn.Linear(hidden, 3 * hidden)
        self.query, self.key, self.value, self.out = (torch.nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x, keep):
        if self._form == "unbind":
            heads = self.qkv(x).view(x.shape[0], x.shape[1], 3, HEADS, -1)
            q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        else:
            is_one = self._form == "chunk"
            parts = self.qkv(x).chunk(3, -1) if is_one else (self.query(x), self.key(x), self.value(x))
            q, k, v = (part.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for part in parts)
        found = self._attend(q, k, v, keep, 0.1)
        return self.out(found.transpose(1, 2).reshape(x.shape))


# --- parts of layers that compute each row by itself


def _in_place(x, keep):
    y = x * 2
    y += 1
    return F.relu(y, inplace=True)


def _halves(x, keep):
    one, other = x.chunk(2, -1)
    return torch.cat([other, one * torch.sigmoid(other)], -1)


PARTS: dict[str, Callable[[int], Any]] = {
    "linear": lambda hidden: torch.nn.Linear(hidden, hidden),
    "mlp": lambda hidden: torch.nn.Sequential(
        torch.nn.Linear(hidden, 2 * hidden), torch.nn.GELU(), torch.nn.Linear(2 * hidden, hidden)
    ),
    "tanh gelu": lambda hidden: torch.nn.GELU(approximate="tanh"),
    "layer norm": lambda hidden: torch.nn.LayerNorm(hidden),
    "rms norm": lambda hidden: torch.nn.RMSNorm(hidden),
    "dropout": lambda hidden: torch.nn.Dropout(0.1),
    "gated": lambda hidden: Gated(hidden),
    "own rms norm": lambda hidden: lambda x, keep: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5),
    "relu": lambda hidden: lambda x, keep: F.relu(x) + 0.1,
    "in place": lambda hidden: _in_place,
    "halves": lambda hidden: _halves,
    "masked": lambda hidden: lambda x, keep: x * keep[..., None],
    "filled": lambda hidden: lambda x, keep: x.masked_fill(~keep[..., None], 0.5),
    "cast": lambda hidden: lambda x, keep: (x.double() * 0.5).float(),
    "softmax": lambda hidden: lambda x, keep: x.softmax(-1),
    "clamp": lambda hidden: lambda x, keep: x.clamp(-1.5, 1.5),
    "heads": lambda hidden: lambda x, keep: x.view(*x.shape[:2], 4, -1).softmax(-1).flatten(2),
}


class Gated(torch.nn.Module):
    """The feed-forward part of Llama."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (torch.nn.Linear(hidden, hidden, bias=False) for _ in range(3))

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(torch.nn.Module):
    """Attention and parts, some of them with a residual connection."""

    def __init__(self, hidden: int, attention: str, parts: Sequence[str], chosen: random.Random) -> None:
        super().__init__()
        self.is_encoder = attention == "encoder layer"
        self.before = chosen.random() < 0.5
        self.norm = torch.nn.LayerNorm(hidden)
        if self.is_encoder:
            self.attention = torch.nn.TransformerEncoderLayer(
                hidden, HEADS, 2 * hidden, 0.1, batch_first=True, norm_first=self.before
            )
        else:
            self.attention = Attention(hidden, attention, chosen.choice(FORMS))
        made = [PARTS[name](hidden) for name in parts]
        self.parts = torch.nn.ModuleList(part for part in made if isinstance(part, torch.nn.Module))
        self._parts = [None if isinstance(part, torch.nn.Module) else part for part in made]
        self._added = [chosen.random() < 0.5 for _ in made]

    def forward(self, x, keep):
        if self.is_encoder:
            x = self.attention(x, src_key_padding_mask=~keep)
        elif self.before:
            x = x + F.dropout(self.attention(self.norm(x), keep), 0.1)
        else:
            x = self.norm(x + self.attention(x, keep))
        modules = iter(self.parts)
        for part, is_added in zip(self._parts, self._added, strict=True):
            y = next(modules)(x) if part is None else part(x, keep)
            x = x + y if is_added else y
        return x


# --- endings: each function gets the model, the hidden states and the batch


@dataclass(frozen=True)
class Batch:
    """The inputs of a step."""

    ids: torch.Tensor
    keep: torch.Tensor
    lengths: torch.Tensor
    labels: torch.Tensor
    classes: torch.Tensor


def _of_tokens(model, x, b, **options):
    return F.cross_entropy(model.head(x).flatten(0, 1), b.labels.flatten(), **options)


def _viewed(model, x, b):
    return F.cross_entropy(model.head(x).view(-1, WORDS), b.labels.view(-1))


def _transposed(model, x, b):
    return F.cross_entropy(model.head(x).transpose(1, 2), b.labels)


def _shifted(model, x, b):
    logits = model.head(x)[:, :-1].contiguous()
    return F.cross_entropy(logits.view(-1, WORDS), b.labels[:, 1:].reshape(-1))


def _shifted_labels(model, x, b):
    labels = F.pad(b.labels, (0, 1), value=IGNORED)[:, 1:].contiguous()
    return F.cross_entropy(model.head(x).view(-1, WORDS), labels.view(-1))


def _unreduced(model, x, b):
    losses = F.cross_entropy(model.head(x).flatten(0, 1), b.labels.clamp(min=0).flatten(), reduction="none")
    return (losses.view(b.keep.shape) * b.keep).sum() / b.keep.sum()


def _log_likelihood(model, x, b):
    return F.nll_loss(model.head(x).log_softmax(-1).flatten(0, 1), b.labels.flatten())


def _gathered(model, x, b):
    found = model.head(x).log_softmax(-1).gather(-1, b.labels.clamp(min=0)[..., None]).squeeze(-1)
    return -(found * b.keep).sum() / b.keep.sum()


def _of_sequences(model, x, b):
    return F.cross_entropy(model.short_head(x), b.classes)


def _masked_mean(model, x, b):
    mask = b.keep[..., None].to(x.dtype)
    return _of_sequences(model, (x * mask).sum(1) / mask.sum(1), b)


def _masked_max(model, x, b):
    return _of_sequences(model, x.masked_fill(~b.keep[..., None], -1e4).amax(1), b)


def _two_losses(model, x, b):
    return _of_tokens(model, x, b) + 0.5 * _of_sequences(model, torch.tanh(x[:, 0]), b)


ENDINGS: dict[str, Callable[[Any, torch.Tensor, Batch], Any]] = {
    "mean": _of_tokens,
    "sum": lambda model, x, b: _of_tokens(model, x, b, reduction="sum") / 10,
    "smooth": lambda model, x, b: _of_tokens(model, x, b, label_smoothing=0.1),
    "viewed": _viewed,
    "transposed": _transposed,
    "shifted": _shifted,
    "shifted labels": _shifted_labels,
    "unreduced": _unreduced,
    "log likelihood": _log_likelihood,
    "gathered": _gathered,
    "squares": lambda model, x, b: ((model.head(x) - 0.5).square() * b.keep[..., None]).sum() / 100,
    "first token": lambda model, x, b: _of_sequences(model, x[:, 0], b),
    "last token": lambda model, x, b: _of_sequences(model, x[:, -1], b),
    "last valid token": lambda model, x, b: _of_sequences(
        model, x[torch.arange(x.shape[0]), b.lengths - 1], b
    ),
    "masked mean": _masked_mean,
    "masked max": _masked_max,
    "two losses": _two_losses,
}
# Endings whose results depend on all rows.
WHOLE_ENDINGS: dict[str, Callable[[Any, torch.Tensor, Batch], Any]] = {
    "mean of all": lambda model, x, b: _of_sequences(model, x.mean(1), b),
    "max of all": lambda model, x, b: _of_sequences(model, x.amax(1), b),
    "logits beside the loss": lambda model, x, b: (
        F.cross_entropy((logits := model.head(x)).flatten(0, 1), b.labels.flatten()),
        logits,
    ),
    "penalty": lambda model, x, b: _of_sequences(model, x[:, 0], b) + 1e-3 * x.square().sum(),
    "labels of all": lambda model, x, b: F.cross_entropy(
        model.head(x).flatten(0, 1), b.labels.clamp(min=0).flatten()
    ),
    "boolean index": lambda model, x, b: F.cross_entropy(model.head(x[b.keep]), b.labels[b.keep]),
}

# --- misses: each reads rows of padding, and returns a tensor of the size of its argument


class Transposed(torch.nn.Module):
    """A module that gets features before tokens."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x.transpose(1, 2)).transpose(1, 2)


class First(torch.nn.Module):
    """The first result of a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)[0]


MISSES: dict[str, Callable[[int, int], Any]] = {
    "mean": lambda hidden, length: lambda x: x.mean(1, keepdim=True).expand_as(x) * 2,
    "batch norm": lambda hidden, length: Transposed(torch.nn.BatchNorm1d(hidden)),
    "convolution": lambda hidden, length: Transposed(torch.nn.Conv1d(hidden, hidden, 3, padding=1)),
    "Function": lambda hidden, length: Centered.apply,
    "mixer": lambda hidden, length: Transposed(torch.nn.Linear(length, length)),
    "cumsum": lambda hidden, length: lambda x: x.cumsum(1) * 0.3,
    "softmax": lambda hidden, length: lambda x: x.softmax(1) * 4,
    "layer norm": lambda hidden, length: lambda x: F.layer_norm(x, x.shape[1:]),
    "LSTM": lambda hidden, length: First(torch.nn.LSTM(hidden, hidden, batch_first=True)),
    "roll": lambda hidden, length: lambda x: x.roll(1, 1),
    "flip": lambda hidden, length: lambda x: x.flip(1),
    "mean over the batch": lambda hidden, length: lambda x: x.mean(0, keepdim=True).expand_as(x) * 2,
}
