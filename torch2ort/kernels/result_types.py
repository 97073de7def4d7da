"""Element types of results that PyTorch tells wrongly of tensors without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch2ort.kernels._torch_private import OpOverload, schema_of

aten = torch.ops.aten
# Operators of batch normalisation -> how many of their last results are the new running statistics.
_BATCH_NORMS: dict[OpOverload, int] = {
    aten._native_batch_norm_legit_functional.default: 2,
    aten._batch_norm_with_update_functional.default: 2,
    aten._native_batch_norm_legit.no_stats: 0,
    aten._native_batch_norm_legit_no_training.default: 0,
    aten.native_batch_norm.default: 0,
}


def with_eagers_types(
    operator: OpOverload, arguments: Sequence[Any], keywords: Mapping[str, Any], results: Sequence[Any]
) -> Sequence[Any]:
    """``results`` of a call of ``operator``, each in the element type that eager PyTorch gives it.

    Of a batch in half precision, the statistics are in the type of the parameters or of what they replace.
    """
    running = _BATCH_NORMS.get(operator)
    if running is None:
        return results
    names = [a.name for a in schema_of(operator).arguments]
    given = {**dict(zip(names, arguments, strict=False)), **keywords}
    of_batch = (given.get(name) for name in ("weight", "running_mean", "input"))
    kind = next(tensor for tensor in of_batch if tensor is not None).dtype
    output, mean, inverse, *rest = results
    first = len(rest) - running
    new = (
        value.to(given[name].dtype)
        for value, name in zip(rest[first:], ("running_mean", "running_var"), strict=False)
    )
    return (output, mean.to(kind), inverse.to(kind), *rest[:first], *new)
