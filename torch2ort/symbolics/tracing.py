"""What torch.export cannot trace and PyTorch can run, made traceable for the time of an export."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from torch2ort.symbolics._torch_private import BatchNorm


@contextmanager
def tracing() -> Iterator[None]:
    """Context manager around ``torch.export.export``, for the thread that enters it.

    ``x.data`` is ``x.detach()``: torch.export loses the former. A BatchNorm with ``momentum=None``, whose
    ``forward`` turns a count into a Python number, computes with the count as a tensor.
    """
    with _lock:
        _threads[threading.get_ident()] = _threads.get(threading.get_ident(), 0) + 1
        if sum(_threads.values()) == 1:
            _install()
    try:
        yield
    finally:
        with _lock:
            _threads[threading.get_ident()] -= 1
            if not any(_threads.values()):
                _uninstall()


_lock = threading.Lock()
_threads: dict[int, int] = {}
_original_forward: Callable[..., torch.Tensor] = BatchNorm.forward
_original_data: Any = torch.Tensor.data


def _install() -> None:
    BatchNorm.forward = _forward  # type: ignore[method-assign]
    torch.Tensor.data = property(_data, _original_data.__set__)  # type: ignore[assignment]


def _uninstall() -> None:
    BatchNorm.forward = _original_forward  # type: ignore[method-assign]
    del torch.Tensor.data


def _traces() -> bool:
    return _threads.get(threading.get_ident(), 0) > 0


def _data(self: torch.Tensor) -> torch.Tensor:
    return self.detach() if _traces() else _original_data.__get__(self)


def _forward(self: BatchNorm, input: torch.Tensor) -> torch.Tensor:
    averages = self.momentum is None and self.training and self.track_running_stats
    if not _traces() or not averages or self.num_batches_tracked is None:
        return _original_forward(self, input)
    self._check_input_dim(input)
    self.num_batches_tracked.add_(1)
    with torch.no_grad():
        _average(self, input.detach())
    return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)


def _average(module: BatchNorm, input: torch.Tensor) -> None:
    """Running statistics as the mean over all batches so far."""
    assert module.running_mean is not None
    assert module.running_var is not None
    assert module.num_batches_tracked is not None
    share = 1 / module.num_batches_tracked.to(input.dtype)
    axes = [0, *range(2, input.dim())]
    module.running_mean.copy_(module.running_mean * (1 - share) + input.mean(axes) * share)
    module.running_var.copy_(module.running_var * (1 - share) + input.var(axes) * share)
