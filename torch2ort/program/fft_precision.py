"""Refusal of Fourier transforms that ONNX Runtime computes with fewer digits than their type has."""

from __future__ import annotations

import torch

from torch2ort.errors import UnsupportedOperatorError
from torch2ort.program.kernel_sites import arguments_of
from torch2ort.support.provenance import source_line

aten = torch.ops.aten
_INVERTING = (aten._fft_c2r.default, aten._fft_c2c.default)
_DOUBLE = (torch.float64, torch.complex128)


def refuse_inexact_transforms(graph: torch.fx.Graph) -> None:
    """Refuse an inverse Fourier transform in double, which ONNX Runtime divides by its length in float32.

    For a power of two the quotient is exact. A complex tensor cannot be passed to PyTorch's kernel instead.

    Raises:
        UnsupportedOperatorError: with the operator, its line, and what to do.
    """
    for node in graph.nodes:
        lengths = _inverse_lengths(node)
        if any(not isinstance(length, int) or length & (length - 1) for length in lengths):
            raise UnsupportedOperatorError(
                f"{node.target} at {source_line(node)} inverts a Fourier transform in torch.float64, which "
                f"ONNX Runtime divides by its length with the digits of torch.float32. Choose a power of two "
                f"as its length, convert to torch.float32, or put the transform and what computes with it "
                f"into a torch.autograd.Function"
            )


def _inverse_lengths(node: torch.fx.Node) -> list[int | torch.SymInt]:
    """Return the lengths of the axes along which ``node`` inverts a transform in double."""
    arguments = arguments_of(node) if node.target in _INVERTING else {}
    if not arguments or arguments.get("forward") or node.meta["val"].dtype not in _DOUBLE:
        return []
    return [node.meta["val"].shape[axis] for axis in arguments["dim"]]
