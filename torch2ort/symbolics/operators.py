"""Operators of torch2ort's own that stand in a program between decomposition and translation."""

from __future__ import annotations

import torch

from torch2ort.symbolics._torch_private import OpOverload

_library = torch.library.Library("torch2ort", "FRAGMENT")
_library.define("dropout_noise(Tensor like, float p) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
_library.define(
    "cross_entropy(Tensor input, Tensor target, Tensor? weight, int reduction, int ignore_index) -> Tensor"
)
_library.define("checked_index(Tensor index, Tensor[] tensors, str check) -> Tensor")
_library.define("must_compute(Tensor value) -> Tensor")

# Dropout is noise times the input: the product is ONNX's, the noise is PyTorch's.
dropout_noise: OpOverload = torch.ops.torch2ort.dropout_noise.default
# Cross entropy of class indices without label smoothing: what ONNX's SoftmaxCrossEntropyLoss can do.
cross_entropy: OpOverload = torch.ops.torch2ort.cross_entropy.default
# The same indices, which eager's operator would take; see torch2ort.symbolics.indices.
checked_index: OpOverload = torch.ops.torch2ort.checked_index.default
# Behind a value that is computed though nobody reads it; see torch2ort.symbolics.unread_checks.
must_compute: OpOverload = torch.ops.torch2ort.must_compute.default
torch.fx.node.has_side_effect(must_compute)


@torch.library.register_fake("torch2ort::dropout_noise", lib=_library)
def _fake_dropout_noise(like: torch.Tensor, p: float) -> torch.Tensor:
    return torch.empty_like(like)


@torch.library.register_fake("torch2ort::cross_entropy", lib=_library)
def _fake_cross_entropy(
    input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
) -> torch.Tensor:
    return input.new_empty(target.shape if reduction == 0 else ())


@torch.library.register_fake("torch2ort::checked_index", lib=_library)
def _fake_checked_index(index: torch.Tensor, tensors: list[torch.Tensor], check: str) -> torch.Tensor:
    return torch.empty_like(index, memory_format=torch.contiguous_format)


@torch.library.register_fake("torch2ort::must_compute", lib=_library)
def _fake_must_compute(value: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device=value.device)
