"""Refusals of sparse gradients and complex numbers, which no engine trains."""

from __future__ import annotations

import torch

from torch2ort.errors import UnsupportedOperatorError
from torch2ort.program.half_precision import floating_dtypes
from torch2ort.program.kernel_sites import arguments_of, is_operator
from torch2ort.support.provenance import source_line


def refuse_sparse_and_complex(node: torch.fx.Node) -> None:
    """Refuse gradients that are sparse, and complex numbers.

    Args:
        node: of a traced program.

    Raises:
        UnsupportedOperatorError: names the operator, its line, and what to do.
    """
    if is_operator(node) and arguments_of(node).get("sparse") is True:
        raise UnsupportedOperatorError(
            f"{node.target} at {source_line(node)} has sparse=True, but the gradients of a graph are "
            f"dense. Make the table with sparse=False, or put the look-up into a torch.autograd.Function"
        )
    if any(d.is_complex for d in floating_dtypes(node)):
        raise UnsupportedOperatorError(
            f"{node.target} at {source_line(node)} computes with complex numbers, which an ONNX graph "
            f"that is trained cannot hold. Put the complex part of the model into a "
            f"torch.autograd.Function, which keeps PyTorch's kernels"
        )
