"""Private names of autograd and functorch, and the versions tried.

| name | tried on |
| --- | --- |
| torch._C._FunctionBase.apply | 2.11.0, 2.13.0 |
| torch._C._autograd._get_current_graph_task_keep_graph | 2.11-2.15.0 |
| torch._C._functorch.is_legacy_batchedtensor | 2.13.0 |
| torch._C._vmapmode_decrement_nesting, _vmapmode_increment_nesting | 2.13.0 |
| torch.Tensor._base, _is_view, _version | 2.13.0 |
| torch._C._functorch.peek_interpreter_stack, TransformType | 2.13.0, 2.15.0 |
| torch.utils._python_dispatch.TorchDispatchMode | 2.11-2.15.0 |
| torch._add_batch_dim, torch._remove_batch_dim | 2.13.0 |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch2ort.support.versions import need, private_names

with private_names("torch"):
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    need(torch._C._functorch, "peek_interpreter_stack", "TransformType")
    need(torch.Tensor, "_base", "_is_view", "_version")
    _tensor: Any = torch.Tensor
    # Properties of a tensor's memory: the function that a TorchFunctionMode sees -> its name.
    OF_MEMORY: dict[Any, str] = {
        _tensor._base.__get__: "_base",
        _tensor._is_view: "_is_view()",
        _tensor._version.__get__: "_version",
    }
    need(torch._C._FunctionBase, "apply")
    need(torch._C._autograd, "_get_current_graph_task_keep_graph")
    need(torch._C._functorch, "is_legacy_batchedtensor")
    need(torch._C, "_vmapmode_decrement_nesting", "_vmapmode_increment_nesting")
    need(torch, "_add_batch_dim", "_remove_batch_dim")


# True for a gradient that represents a batch of gradients, in a backward that is called with a batch.
is_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor

# True while the running backward was called with ``retain_graph=True``.
backward_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


def in_gradient_transform() -> bool:
    """Return True if the innermost torch.func transform that runs computes a derivative in reverse mode."""
    transform = torch._C._functorch.peek_interpreter_stack()
    return transform is not None and transform.key() == torch._C._functorch.TransformType.Grad


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return the C function that ``function.apply`` calls while no torch.func transform is running."""
    base: Any = torch._C._FunctionBase
    bound: Callable[..., Any] = vars(base)["apply"].__get__(None, function)
    return bound


def out_of_batch(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensors that a batched tensor represents, stacked along the first dimension."""
    whole: torch.Tensor = torch._remove_batch_dim(tensor, _level(), 1, 0)
    return whole


def into_batch(tensor: torch.Tensor) -> torch.Tensor:
    """Return the batched tensor that represents the slices of ``tensor`` along the first dimension."""
    batched: torch.Tensor = torch._add_batch_dim(tensor, 0, _level())
    return batched


def _level() -> int:
    deeper: int = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    return deeper - 1


def version_of(tensor: torch.Tensor) -> int:
    """Return the counter of in-place writes to ``tensor``; 0 for an inference tensor, which has none."""
    try:
        return tensor._version
    except RuntimeError:
        if tensor.is_inference():
            return 0
        raise
