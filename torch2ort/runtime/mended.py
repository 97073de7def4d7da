"""A session's copy of a graph without what the installed onnxruntime computes wrong."""

from __future__ import annotations

import onnx

from torch2ort.runtime.centering import center_normalizations
from torch2ort.runtime.empty_batches import guard_recurrent
from torch2ort.runtime.empty_sorts import guard_sorts
from torch2ort.runtime.roots import widen_roots
from torch2ort.runtime.sigmoids import divide_sigmoids


def mended(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model``, or a copy of it that the installed onnxruntime computes as PyTorch does."""
    return guard_recurrent(guard_sorts(widen_roots(center_normalizations(divide_sigmoids(model)))))
