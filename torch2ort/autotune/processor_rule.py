"""The built-in rule: operators of ONNX that PyTorch's kernels compute faster on a processor.

It was measured over a BERT, a GPT-2 and convolutional nets, with cold memory, as in a step. ONNX Runtime
takes 1.13 to 1.17 of MKL's time for matrix products on Intel processors with AVX-512; on AMD's, MKL is the
slower one. oneDNN takes 0.7 of ONNX Runtime's time for convolutions of 32 channels and more, and 0.4 for
GELU, whose parts ONNX Runtime computes one by one.
"""

from __future__ import annotations

import functools

import torch

from torch2ort.support.processor import has_feature, vendor

# Names of the operators of each kind.
KINDS = {
    "products": frozenset({"addmm", "baddbmm", "bmm", "mm"}),
    "convolutions": frozenset({"convolution"}),
    "GELU": frozenset({"gelu"}),
    "softmax": frozenset({"_log_softmax", "_softmax"}),
    "sums": frozenset({"mean", "sum"}),
}
CONVOLUTIONS = KINDS["convolutions"]


@functools.cache
def faster_in_kernels() -> frozenset[str]:
    """Return the operators that PyTorch's kernels compute faster on this processor, if they are large."""
    is_intel = vendor() == "GenuineIntel" and has_feature("avx512f")
    if not (is_intel and torch.backends.mkl.is_available()):
        return frozenset()
    has_onednn = torch.backends.mkldnn.is_available()
    return KINDS["products"] | KINDS["GELU"] | (CONVOLUTIONS if has_onednn else frozenset())
