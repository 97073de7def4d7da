"""Private names of transforms, modes, checkpoints and FSDP around a call, and the versions tried.

| name | tried on |
| --- | --- |
| torch._subclasses: fake_tensor.FakeTensor, functional_tensor.FunctionalTensor | 2.13.0, 2.15.0 |
| torch._C._functorch.peek_interpreter_stack | 2.13.0, 2.15.0 |
| torch._C._len_torch_dispatch_stack | 2.11-2.15.0 |
| torch._C._get_tracing_state | 2.11.0, 2.13.0 |
| torch.autograd.forward_ad._current_level | 2.13.0, 2.15.0 |
| torch._C._autograd._top_saved_tensors_default_hooks | 2.13.0, 2.15.0 |
| torch.utils._python_dispatch._get_current_dispatch_mode_stack | 2.11-2.15.0 |
| torch.autograd.Variable._execution_engine.queue_callback | 2.11-2.15.0 |
| torch.distributed.fsdp: FSDPModule._get_fsdp_state | 2.11-2.15.0 |
| its result's _modules, _mp_policy, _is_root | 2.11-2.15.0 |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

from torch2ort.support.versions import need, private_names

with private_names("torch"):
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    need(torch._C._functorch, "peek_interpreter_stack")
    need(torch._C, "_len_torch_dispatch_stack")
    need(torch._C, "_get_tracing_state")
    need(torch.autograd.forward_ad, "_current_level")
    need(torch._C._autograd, "_top_saved_tensors_default_hooks")
    need(torch.autograd.Variable._execution_engine, "queue_callback")

# The types that replace a tensor while a model is traced.
TRACED: tuple[type[torch.Tensor], ...] = (FakeTensor, FunctionalTensor)


# The context of a call, cheap to query: functions with their arguments, and their results in most programs.
SURROUNDINGS: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...] = (
    (torch._C._len_torch_dispatch_stack, ()),
    (torch._C._get_tracing_state, ()),
    (torch._C._functorch.peek_interpreter_stack, ()),
    (vars(torch.autograd.forward_ad).__getitem__, ("_current_level",)),
    (torch._C._autograd._top_saved_tensors_default_hooks, (True,)),
)
USUAL_SURROUNDINGS = (0, None, None, -1, None)


def in_transform() -> bool:
    """Return True if a torch.func transform (vmap, grad, jvp, ...) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def dispatch_modes() -> list[Any]:
    """Return the dispatch modes that are active, the outermost first."""
    return _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []


def in_forward_mode() -> bool:
    """Return True if forward-mode differentiation is on."""
    return torch.autograd.forward_ad._current_level >= 0


def packing_hook() -> Any:
    """Return the hook that packs the tensors that autograd saves; ``None`` if there is none."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks and hooks[0]


def in_checkpoint() -> bool:
    """Return True if the code runs in a ``torch.utils.checkpoint`` without ``use_reentrant``.

    Also True while backward recomputes it.
    """
    return getattr(packing_hook(), "__module__", "") == torch.utils.checkpoint.__name__


def when_backward_ends(call: Callable[[], None]) -> None:
    """Call ``call`` when the running backward has accumulated all gradients into their tensors."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def is_sharded_with_others(module: Any) -> bool:
    """Return True if FSDP groups a module with others."""
    return len(module._get_fsdp_state()._modules) > 1


def is_sharded_below_another(module: Any) -> bool:
    """Return True if FSDP found, in a forward, that this module is not the root of its FSDP modules."""
    return module._get_fsdp_state()._is_root is False


def sharded_types(module: Any) -> Any:
    """Return FSDP's mixed-precision policy for a module."""
    return module._get_fsdp_state()._mp_policy


def is_sharding_hook(hook: Any, module: Any) -> bool:
    """Return True if FSDP registered this hook on a module."""
    return getattr(hook, "__self__", None) is module._get_fsdp_state()
