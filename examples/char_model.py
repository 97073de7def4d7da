"""The model of char_transformer.py: a character transformer with two custom autograd Functions.

The attention weights come from ``entmax``, a library from PyPI, used as it is. The feed-forward uses
:class:`SwiGLU`, with a backward written by hand. Neither is registered with torch2ort. It prints nothing.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from entmax import entmax15
from torch import Tensor, nn

HIDDEN = -1e4  # score of a later character; exp(-1e4) is 0, and entmax's squares of it are finite in float32


class SwiGLU(torch.autograd.Function):
    """``silu(gate) * value`` that saves only its inputs and recomputes the sigmoid in backward."""

    @staticmethod
    def forward(ctx, gate: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(gate, value)
        return F.silu(gate) * value

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, value = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        return grad * value * (sigmoid + silu * (1 - sigmoid)), grad * silu


class Block(nn.Module):
    """Pre-norm transformer block: sparse causal attention, then a gated feed-forward."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_feed_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate_and_value, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)
        later = torch.ones(context, context, dtype=torch.bool).triu(1)
        self.register_buffer("later", later, persistent=False)

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        parts = self.query_key_value(x).chunk(3, -1)
        query, key, value = (part.reshape(shape).transpose(1, 2) for part in parts)
        scores = query @ key.transpose(-2, -1) / math.sqrt(shape[-1])
        weights = entmax15(scores.masked_fill(self.later[:length, :length], HIDDEN), dim=-1)
        return self.mix((weights @ value).transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_attention(x))
        gate, value = self.gate_and_value(self.norm_feed_forward(x)).chunk(2, -1)
        return x + self.down(SwiGLU.apply(gate, value))


class CharTransformer(nn.Module):
    """Predicts the next character."""

    def __init__(self, symbols: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.character, self.position = nn.Embedding(symbols, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, context) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits (batch, length, symbols), or with `targets` (batch, length) the mean loss."""
        x = self.character(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
