"""Counter-based random numbers of a step: a hash of a seed, of the call, and of each element's position.

ONNX Runtime's random operators have generators in the session, which no checkpoint contains. Here the seed
is an input: a step with the same seed and step number draws the same numbers on every machine.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch

from torch2ort.errors import UnsupportedOperatorError
from torch2ort.program import internal_ops
from torch2ort.program.fx_inline import inline
from torch2ort.program.fx_insert import replace_call
from torch2ort.program.kernel_sites import arguments_of, is_random
from torch2ort.support.provenance import source_line

aten = torch.ops.aten
# Numbers have 31 bits, so a product of two fits into 64: ONNX has shifts of unsigned integers alone.
_BITS = 31
_MASK = (1 << _BITS) - 1
# The number of bits of an integer that float32 represents exactly.
_DIGITS = 24


def draw_from_seed(graph: torch.fx.Graph, seed: torch.fx.Node) -> None:
    """Replace PyTorch's random operators by draws from ``seed``.

    Args:
        graph: a functional graph; changed in place.
        seed: a node of int64 and shape (2,): the seed, and the number of the step.

    Raises:
        UnsupportedOperatorError: an operator draws from a distribution that is not implemented here.
    """
    count = 0
    for node in list(graph.nodes):
        if not is_random(node):
            continue
        count += 1
        arguments = arguments_of(node)
        like = _like(node, arguments)
        given = [n for n in like if isinstance(n, torch.fx.Node)]

        def draw(numbers: torch.Tensor, *tensors: torch.Tensor, node: Any = node, salt: int = count) -> Any:
            return _results(node, numbers, salt, tensors)

        with graph.inserting_before(node):
            results = inline(graph, draw, [seed, *given])
        replace_call(node, results)


def _like(node: torch.fx.Node, arguments: dict[str, Any]) -> list[Any]:
    """Return the tensors that a random operator takes, first the one that determines the size."""
    if node.target is internal_ops.dropout_noise:
        return [arguments["like"]]
    first = arguments.get("self", arguments.get("input"))
    other = arguments.get("p")
    return [first, other] if isinstance(other, torch.fx.Node) else [first]


def _results(
    node: torch.fx.Node, seed: torch.Tensor, salt: int, tensors: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    target, arguments = node.target, arguments_of(node)
    if not tensors:
        _refuse(node)
    like = tensors[0]
    if target is aten.native_dropout.default:
        if arguments["train"] is False:
            return like.clone(), torch.ones_like(like, dtype=torch.bool)
        kept = _kept(like, seed, salt, arguments["p"])
        return like * kept.to(like.dtype) * _scale(arguments["p"]), kept
    if target is internal_ops.dropout_noise:
        kept = _kept(like, seed, salt, arguments["p"])
        return (kept.to(like.dtype) * _scale(arguments["p"]),)
    dtype = node.meta["val"].dtype
    if target is aten.bernoulli.p:
        return ((_uniform(like, seed, salt) < arguments["p"]).to(dtype),)
    if target is aten.bernoulli.default:
        return ((_uniform(like, seed, salt) < like).to(dtype),)
    if target is aten.rand_like.default:
        return (_uniform(like, seed, salt).to(dtype),)
    if target is aten.randn_like.default:
        return (_normal(like, seed, salt).to(dtype),)
    _refuse(node)


def _refuse(node: torch.fx.Node) -> NoReturn:
    raise UnsupportedOperatorError(
        f"{node.target} at {source_line(node)} draws random numbers from a distribution that a file of a "
        f"training step does not support. Write it with dropout, bernoulli, rand_like or randn_like"
    )


def _scale(p: float) -> float:
    return 0.0 if p >= 1 else 1 / (1 - p)


def _kept(like: torch.Tensor, seed: torch.Tensor, salt: int, p: float) -> torch.Tensor:
    return _uniform(like, seed, salt) >= p


def _normal(like: torch.Tensor, seed: torch.Tensor, salt: int) -> torch.Tensor:
    """Compute normally distributed numbers by the Box-Muller transform."""
    # Above zero, as zero has no logarithm.
    radius = 1 - _uniform(like, seed, 2 * salt + (1 << 20))
    angle = _uniform(like, seed, 2 * salt + 1 + (1 << 20))
    return torch.sqrt(-2 * torch.log(radius)) * torch.cos(2 * math.pi * angle)


def _uniform(like: torch.Tensor, seed: torch.Tensor, salt: int) -> torch.Tensor:
    """Compute a float32 number in [0, 1) for each element of ``like``."""
    key = _mixed((seed[0] & _MASK) ^ _mixed((seed[1] & _MASK) ^ ((salt * 0x9E3779B1) & _MASK)))
    # One number per element; the mask alone limits their count.
    position = torch.arange(like.numel(), dtype=torch.int64, device=like.device).reshape(like.shape)
    bits = _mixed((position ^ key) & _MASK)
    bits = _mixed((bits + key) & _MASK)
    return torch.div(bits, 1 << (_BITS - _DIGITS), rounding_mode="floor").to(torch.float32) / (1 << _DIGITS)


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """Mix the bits of a number, by products with odd numbers and xors with its upper half."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x46CA6B01), (16, 0x2C1B3C6D)):
        upper = torch.div(bits, 1 << shift, rounding_mode="floor")
        bits = ((bits ^ upper) * factor) & _MASK
    return bits
