"""Every private name of torch that torch2ort.cache touches, with the versions tried.

| name | tried on |
| --- | --- |
| torch.overrides._get_current_function_mode_stack | 2.13.0 |
| torch.utils._python_dispatch._get_current_dispatch_mode_stack | 2.13.0 |
| torch.nn.modules.module._global_forward_hooks, _global_forward_pre_hooks | 2.13.0 |
| the attribute _torchdynamo_wrapper_id of functions | 2.13.0 |
| torch._ops.OpOverload, OpOverloadPacket | 2.13.0 |
"""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload, OpOverloadPacket
from torch.nn.modules import module as _module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# An id() that torch.compiler.disable leaves on the functions that it wraps.
ADDRESSES = frozenset({"_torchdynamo_wrapper_id"})

OPERATOR_TYPES: tuple[type, ...] = (OpOverload, OpOverloadPacket)


def active_modes() -> list[Any]:
    """Torch-function and dispatch modes that are entered on this thread."""
    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]


def global_hooks() -> list[Any]:
    """Hooks that run around the forward of every module of the process."""
    return [*_module._global_forward_pre_hooks.values(), *_module._global_forward_hooks.values()]
