"""Four small models whose Functions have bodies in a portable file, or that are written without Functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function


class Swish(Function):
    """Ramachandran et al., 2017."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, beta: float) -> Tensor:
        """Return the activation."""
        return x * torch.sigmoid(beta * x)


class Attention(Function):
    """Attention with a causal mask."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the values, weighted."""
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
        return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


class Quantize(Function):
    """Fake quantisation of activations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        """Return multiples of a step."""
        return torch.clamp(torch.round(x / scale), -128, 127) * scale


class Spike(Function):
    """1 where a membrane's potential is above the threshold, else 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, threshold: float) -> Tensor:
        """Return spikes."""
        return (x > threshold).to(x.dtype)


Call = Callable[..., Tensor]


def as_functions(function: type[Function]) -> Call:
    """Return a function that calls a Function."""
    return function.apply


def as_operators(function: type[Function]) -> Call:
    """Return a function that calls the operators of its forward."""
    return lambda *arguments: function.forward(None, *arguments)


class Perceptron(nn.Module):
    """Eight layers, a Swish behind each."""

    def __init__(self, of: Callable[[type[Function]], Call]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(8))
        self.swish = of(Swish)

    def forward(self, x: Tensor) -> Tensor:
        """Return the last layer's."""
        for layer in self.layers:
            x = self.swish(layer(x), 1.5)
        return x


class Transformer(nn.Module):
    """Four blocks of attention."""

    def __init__(self, of: Callable[[type[Function]], Call]) -> None:
        super().__init__()
        self.inside = nn.ModuleList(nn.Linear(128, 384) for _ in range(4))
        self.outside = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
        self.attention = of(Attention)

    def forward(self, x: Tensor) -> Tensor:
        """Return the last block's."""
        for inside, outside in zip(self.inside, self.outside, strict=True):
            parts = inside(x).unflatten(-1, (3, 4, 32)).permute(2, 0, 3, 1, 4)
            x = x + outside(self.attention(*parts.unbind(0)).transpose(1, 2).flatten(2))
        return x


class Convolutions(nn.Module):
    """Convolutions with quantised activations."""

    def __init__(self, of: Callable[[type[Function]], Call]) -> None:
        super().__init__()
        sizes = (3, 32, 32, 64)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(sizes))
        self.quantize = of(Quantize)

    def forward(self, x: Tensor) -> Tensor:
        """Return the last layer's."""
        for layer in self.layers:
            x = self.quantize(layer(x).relu(), 0.05)
        return x


class Spiking(nn.Module):
    """A spiking net of eight steps."""

    def __init__(self, of: Callable[[type[Function]], Call]) -> None:
        super().__init__()
        self.layer = nn.Linear(128, 256)
        self.spike = of(Spike)

    def forward(self, x: Tensor) -> Tensor:
        """Return the number of spikes."""
        current = self.layer(x)
        potential = total = torch.zeros_like(current)
        for _ in range(8):
            potential = 0.9 * potential + current
            spikes = self.spike(potential, 1.0)
            potential, total = potential - spikes, total + spikes
        return total


MODELS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "perceptron": (Perceptron, (64, 128)),
    "transformer": (Transformer, (4, 32, 128)),
    "convolutions": (Convolutions, (2, 3, 32, 32)),
    "spiking net": (Spiking, (64, 128)),
}
