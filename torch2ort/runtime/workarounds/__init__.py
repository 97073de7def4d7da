"""Workarounds for defects of onnxruntime, one per file, so a session computes as PyTorch does."""

from __future__ import annotations

import onnx

from torch2ort.runtime.workarounds.checked_index import guard_indices
from torch2ort.runtime.workarounds.exact_results import take_exact
from torch2ort.runtime.workarounds.layernorm_centering import center_normalizations
from torch2ort.runtime.workarounds.nan_inf import keep_nan
from torch2ort.runtime.workarounds.rnn_empty_batch import guard_recurrent
from torch2ort.runtime.workarounds.sigmoid import divide_sigmoids
from torch2ort.runtime.workarounds.sqrt_log import widen_roots
from torch2ort.runtime.workarounds.topk_empty import guard_sorts

__all__ = ["apply_exact_workarounds", "apply_workarounds"]

_ALL = (
    take_exact,
    divide_sigmoids,
    center_normalizations,
    widen_roots,
    guard_sorts,
    guard_recurrent,
    keep_nan,
    guard_indices,
)


def apply_exact_workarounds(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return ``model``, or a copy that checks indices and treats NaN as PyTorch does, in any session."""
    return guard_indices(keep_nan(take_exact(model)))


def apply_workarounds(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return ``model``, or a copy that the installed onnxruntime computes as PyTorch does."""
    for apply in _ALL:
        model = apply(model)
    return model
