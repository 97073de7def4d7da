"""Every private name of torch that torch2ort.effects touches, with the versions tried.

| name | tried on |
| --- | --- |
| torch.utils._python_dispatch.TorchDispatchMode | 2.11-2.15.0 |
| torch._C._functorch.peek_interpreter_stack, TransformType | 2.13.0, 2.15.0 |
| torch.Tensor._base, _is_view, _version | 2.13.0 |
"""

from __future__ import annotations

from typing import Any

import torch

from torch2ort.support.versions import need, private_names

with private_names("torch"):
    from torch.utils._python_dispatch import TorchDispatchMode

    need(torch._C._functorch, "peek_interpreter_stack", "TransformType")
    need(torch.Tensor, "_base", "_is_view", "_version")
    _tensor: Any = torch.Tensor
    # What forward may ask a tensor for: the function that a TorchFunctionMode sees -> its name.
    OF_MEMORY: dict[Any, str] = {
        _tensor._base.__get__: "_base",
        _tensor._is_view: "_is_view()",
        _tensor._version.__get__: "_version",
    }

__all__ = ["OF_MEMORY", "TorchDispatchMode", "in_gradient_transform"]


def in_gradient_transform() -> bool:
    """Whether the innermost torch.func transform that runs is one that computes a derivative backward."""
    transform = torch._C._functorch.peek_interpreter_stack()
    return transform is not None and transform.key() == torch._C._functorch.TransformType.Grad
