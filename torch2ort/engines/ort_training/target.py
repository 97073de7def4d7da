"""What onnxruntime-training asks of a graph that it differentiates."""

from __future__ import annotations

from typing import Any

import torch

from torch2ort.engines.ort_training.constant_outputs import tie_constant_outputs
from torch2ort.engines.ort_training.decompositions import FOR_GRADIENTS
from torch2ort.engines.ort_training.kernel_choice import WHOLE, needs_kernel, prefers_kernel
from torch2ort.engines.ort_training.mending import mend
from torch2ort.engines.ort_training.refusals import refuse_untrainable
from torch2ort.engines.ort_training.trainable import untrainable_nodes
from torch2ort.kernels.derivatives import DERIVATIVES
from torch2ort.kernels.large import is_large
from torch2ort.symbolics.decompositions.registry import Decomposition, Table
from torch2ort.symbolics.target import GradientRules, GradientSource


def _decompositions(table: Table) -> Table:
    """Its own in front of those of every graph."""
    own = {**table, **FOR_GRADIENTS}
    return {t: _unless_large(f) if t in DERIVATIVES else f for t, f in own.items()}


def _unless_large(function: Decomposition) -> Decomposition:
    """Leave an operator whole where PyTorch's kernel will do it."""

    def decompose(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented if is_large(self) else function(self, *args, **kwargs)

    return decompose


GRADIENT_RULES = GradientRules(
    source=GradientSource.GRAPH,
    engine="onnxruntime-training",
    whole=WHOLE,
    decompositions=_decompositions,
    prefers_kernel=prefers_kernel,
    needs_kernel=needs_kernel,
    refuse=refuse_untrainable,
    rewrite=mend,
    untrainable=untrainable_nodes,
    complete=tie_constant_outputs,
)
