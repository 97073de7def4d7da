"""What onnxruntime-training cannot train, though a graph could hold it."""

from __future__ import annotations

import torch

from torch2ort.engines.no_gradient import refuse_sparse_and_complex
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.symbolics.half_precision import HALF, computes_in_half, floating_dtypes
from torch2ort.symbolics.source import source_line


def refuse_untrainable(node: torch.fx.Node) -> None:
    """Refuse sparse gradients, and complex and half numbers.

    Args:
        node: carries a gradient.

    Raises:
        UnsupportedOperatorError: names the operator, its line, and what to do.
    """
    refuse_sparse_and_complex(node)
    if computes_in_half(node):
        half = next(iter(floating_dtypes(node) & HALF))
        raise UnsupportedOperatorError(
            f"{node.target} at {source_line(node)} computes with {half}, of which "
            f"onnxruntime-training cannot add up gradients on CPU. Train with engine='joint', which does, or "
            f"in float32, or put the part of the model in lower precision into a torch.autograd.Function; "
            f"where no gradients are wanted, call the model under torch.no_grad()"
        )
