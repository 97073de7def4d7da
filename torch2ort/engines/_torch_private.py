"""Every private name of torch that torch2ort.engines touches, with the versions tried.

| name | tried on |
| --- | --- |
| torch._C._FunctionBase.apply | 2.11.0, 2.13.0 |
| torch._C._autograd._get_current_graph_task_keep_graph | 2.11-2.15.0 |
| torch.Tensor._version | 2.11-2.15.0 |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch2ort.versions import need, private_names

with private_names("torch"):
    need(torch.Tensor, "_version")
    need(torch._C._FunctionBase, "apply")
    need(torch._C._autograd, "_get_current_graph_task_keep_graph")


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The C code that ``function.apply`` ends in, where no torch.func transform is running."""
    base: Any = torch._C._FunctionBase
    bound: Callable[..., Any] = vars(base)["apply"].__get__(None, function)
    return bound


def backward_keeps_graph() -> bool:
    """Whether the backward now running was called with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def version_of(tensor: torch.Tensor) -> int:
    """Counter that every in-place write to ``tensor`` raises; 0 for one of inference mode, which has none."""
    try:
        return tensor._version
    except RuntimeError:
        if tensor.is_inference():
            return 0
        raise
