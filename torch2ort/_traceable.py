"""Modules of torch whose forward reads a number out of a tensor, in a form that can be traced."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

from torch2ort._torch_private import BatchNorm


@contextlib.contextmanager
def traceable_modules(model: torch.nn.Module) -> Iterator[None]:
    """Let the modules below ``model`` be traced; they are as before afterwards."""
    changed = [m for m in model.modules() if isinstance(m, BatchNorm) and _averages_over_all_batches(m)]
    for module in changed:
        module.__dict__["forward"] = functools.partial(_cumulative_batch_norm, module)
    try:
        yield
    finally:
        for module in changed:
            del module.__dict__["forward"]


def _averages_over_all_batches(module: BatchNorm) -> bool:
    return (
        module.training
        and module.track_running_stats
        and module.momentum is None
        and "forward" not in module.__dict__
    )


def _cumulative_batch_norm(module: BatchNorm, x: torch.Tensor) -> torch.Tensor:
    """BatchNorm with ``momentum=None``: the running statistics are the plain average over all batches.

    PyTorch's own forward computes the factor ``1 / num_batches_tracked`` as a Python number.
    """
    module._check_input_dim(x)
    assert module.num_batches_tracked is not None
    assert module.running_mean is not None
    assert module.running_var is not None
    with torch.no_grad():
        module.num_batches_tracked.add_(1)
        factor = module.num_batches_tracked.to(x.dtype).reciprocal()
        variance, mean = torch.var_mean(x, [0, *range(2, x.dim())])
        module.running_mean.copy_(module.running_mean * (1 - factor) + mean * factor)
        module.running_var.copy_(module.running_var * (1 - factor) + variance * factor)
    return torch.nn.functional.batch_norm(x, None, None, module.weight, module.bias, True, 0.0, module.eps)
