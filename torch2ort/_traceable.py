"""What torch.export cannot trace and PyTorch can run, made traceable for the time of an export."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

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


_data: Any = torch.Tensor.data


class DataAsDetached:
    """Makes ``x.data`` be ``x.detach()`` in the thread that enters this: torch.export loses the former."""

    _lock = threading.Lock()
    _threads: ClassVar[dict[int, int]] = {}

    def __enter__(self) -> None:
        with self._lock:
            thread = threading.get_ident()
            self._threads[thread] = self._threads.get(thread, 0) + 1
            torch.Tensor.data = property(self._get, _data.__set__)  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        with self._lock:
            thread = threading.get_ident()
            self._threads[thread] -= 1
            if self._threads[thread] == 0:
                del self._threads[thread]
            if not self._threads:
                # The attribute of the base class shows again.
                del torch.Tensor.data

    @classmethod
    def _get(cls, tensor: torch.Tensor) -> torch.Tensor:
        if threading.get_ident() in cls._threads:
            return tensor.detach()
        data: torch.Tensor = _data.__get__(tensor)
        return data
