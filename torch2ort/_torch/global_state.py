"""Private names of process-wide state: hooks, modes, registered operators, settings, and the versions tried.

| name | tried on |
| --- | --- |
| torch.overrides._get_current_function_mode_stack | 2.11-2.15.0 |
| torch.utils._python_dispatch._get_current_dispatch_mode_stack | 2.11-2.15.0 |
| torch._C._len_torch_function_stack, _len_torch_dispatch_stack | 2.11-2.15.0 |
| torch.nn.modules.module._global_forward_hooks, _global_forward_pre_hooks | 2.11-2.15.0 |
| torch.nn.modules.module._global_backward_hooks, _global_backward_pre_hooks | 2.11-2.15.0 |
| the attribute _torchdynamo_wrapper_id of functions | 2.11-2.15.0 |
| torch._ops.OpOverload, OpOverloadPacket | 2.11-2.15.0 |
| torch._library.custom_ops.OPDEFS, CustomOpDef (_opoverload, _abstract_fn, ...) | 2.11-2.15.0 |
| torch._library.simple_registry.singleton, and the fake_impl.kernel.func of its entries | 2.11-2.15.0 |
| torch._C._dispatch_dump, text of its lines | 2.11-2.15.0 |
| torch._subclasses.fake_tensor.FakeTensor | 2.11-2.15.0 |
| torch._dynamo.config, torch._export.config, torch._functorch.config | 2.11-2.15.0 |
| torch._dynamo.mutation_guard, which wraps methods of torch.nn.Module when dynamo first runs | 2.11-2.15.0 |
| torch.nn.Module.___needs_generation_tag_patch, by which it knows that it wrapped them | 2.11-2.13.0 |
| torch.nn.Module.___has_generation_tag_patch, the same of a later torch | 2.14.1-2.15.0 |
| torch.fx.traceback.annotate, which torch.compiler.disable looks up at each call in an export | 2.11-2.15.0 |
| torch._dynamo, which an export imports, and with it modules that import annotate by name | 2.11-2.15.0 |
| torch.fx._lazy_graph_module._use_lazy_graph_module | 2.13.0 |
| torch._C._set_grad_enabled, _InferenceMode, which torch.autograd.grad_mode calls | 2.11-2.15.0 |
| torch._dynamo.eval_frame.OptimizedModule, the result of torch.compile for a module | 2.13.0, 2.15.0 |
| torch.fx.experimental._config, and _config and _is_default of all these | 2.11-2.15.0 |
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import traceback as _notes
from torch.nn.modules import module as _module

from torch2ort._torch.autograd import version_of as version_of
from torch2ort._torch.dispatch import schema_of as schema_of
from torch2ort.support.replaced import replaced
from torch2ort.support.versions import need, private_names

with private_names("torch"):
    from torch._C import _dispatch_dump, _len_torch_dispatch_stack, _len_torch_function_stack
    from torch._library.custom_ops import OPDEFS, CustomOpDef
    from torch._library.simple_registry import singleton as _registered
    from torch._ops import OpOverload, OpOverloadPacket
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx._lazy_graph_module import _use_lazy_graph_module
    from torch.fx.experimental import _config
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    need(torch._C, "_set_grad_enabled", "_InferenceMode")
    need(_config, "_config", "_is_default")
    need(_notes, "annotate")
    need(_module, "_global_forward_hooks", "_global_forward_pre_hooks")
    need(_module, "_global_backward_hooks", "_global_backward_pre_hooks")

set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
InferenceMode: Callable[[bool], contextlib.AbstractContextManager[None]] = torch._C._InferenceMode

# An id() that torch.compiler.disable leaves on the functions that it wraps.
ADDRESSES = frozenset({"_torchdynamo_wrapper_id"})

# The module of the wrappers of torch.nn.Module's methods, which record the age of each new module.
TAGGING = "torch._dynamo.mutation_guard"
# The attributes that it sets on the class torch.nn.Module.
TAGGED = frozenset({"___needs_generation_tag_patch", "___has_generation_tag_patch"})

_CONFIGS = (
    "torch._dynamo.config",
    "torch._export.config",
    "torch._functorch.config",
    "torch.fx.experimental._config",
)

OPERATOR_TYPES: tuple[type, ...] = (OpOverload, OpOverloadPacket, CustomOpDef)
# The attributes of a CustomOpDef that hold its fake kernel, and its derivative.
FAKE_OF_DEFINITION = ("_abstract_fn",)
DERIVATIVE_OF_DEFINITION = ("_setup_context_fn", "_backward_fn")


def overloads(operator: Any) -> list[OpOverload]:
    """Return the overloads of one of :data:`OPERATOR_TYPES`."""
    if isinstance(operator, OpOverload):
        return [operator]
    if isinstance(operator, CustomOpDef):
        return [operator._opoverload]
    return [getattr(operator, name) for name in operator.overloads()]


def operator_name(operator: Any) -> str:
    """Return ``namespace.name`` or ``namespace.name.overload`` of one of :data:`OPERATOR_TYPES`."""
    return str(operator._opoverload if isinstance(operator, CustomOpDef) else operator)


def definition_of(name: str) -> CustomOpDef | None:
    """Return the CustomOpDef of an operator; ``None`` if ``torch.library.custom_op`` did not register it."""
    return OPDEFS.get(name)


def fake_kernel_of(name: str) -> Any:
    """Return the Python function that was registered as an operator's fake kernel, or ``None``."""
    kernel = _registered.find(name).fake_impl.kernel
    return None if kernel is None else kernel.func


def has_derivative_in_python(name: str) -> bool:
    """Return True if Python code registered an autograd kernel that no attribute of PyTorch's holds."""
    return (
        re.search(r"^Autograd\w*(\[alias\])?: registered at .*\.py:\d+ ", _dispatch_dump(name), re.M)
        is not None
    )


def code_written_when_read() -> contextlib.AbstractContextManager[None]:
    """Context in which a trace generates the Python code of its module when it is first read or called."""
    return _use_lazy_graph_module(should_use=True)


def notes_of_this_thread() -> contextlib.AbstractContextManager[None]:
    """Keep other threads from annotating the nodes that this thread traces.

    While torch.export runs, functions that torch.compiler.disable wraps (of optimizers, checkpoints, an
    ORTModule) write to a process-wide dictionary, from any thread. The export replaces that dictionary for
    each node, so either thread may raise a KeyError.
    """
    # Modules that import the function by name do so here, before it is replaced.
    importlib.import_module("torch._dynamo")
    annotate, tracing = _notes.annotate, threading.get_ident()

    def annotate_here(notes: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
        return annotate(notes) if threading.get_ident() == tracing else contextlib.nullcontext()

    return replaced(_notes, annotate=annotate_here)


def modes_set_by(
    gradients: Callable[[bool], None], inference: Callable[[bool], contextlib.AbstractContextManager[None]]
) -> contextlib.AbstractContextManager[None]:
    """Let ``torch.no_grad``, ``enable_grad``, ``set_grad_enabled``, ``inference_mode`` call the arguments."""
    return replaced(torch._C, _set_grad_enabled=gradients, _InferenceMode=inference)


def active_modes() -> tuple[Any, ...]:
    """Return the torch-function and dispatch modes that are entered on this thread."""
    if not _len_torch_function_stack() and not _len_torch_dispatch_stack():
        return ()  # the case of each step of nearly all programs
    return (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())


def global_hook_tables() -> tuple[dict[int, Any], ...]:
    """Return the tables of hooks that run around forward or backward of every module of the process."""
    return (
        _module._global_forward_pre_hooks,
        _module._global_forward_hooks,
        _module._global_backward_pre_hooks,
        _module._global_backward_hooks,
    )


def all_modules_have_backward_hooks() -> bool:
    """Return True if a hook is registered on the gradients of every module of the process."""
    return bool(_module._global_backward_hooks or _module._global_backward_pre_hooks)


def global_hooks() -> list[Any]:
    """Return the hooks in the tables of :func:`global_hook_tables`."""
    return [list(table.values()) for table in global_hook_tables()]


def changed_settings() -> list[str]:
    """Return the settings of torch's tracing that differ from their defaults."""
    # A module that is not imported yet has its defaults, and is slow to import.
    configs: dict[str, Any] = {name: sys.modules[name] for name in _CONFIGS if name in sys.modules}
    return [
        f"{module}.{name} = {getattr(config, name)!r}"
        for module, config in configs.items()
        for name, entry in config._config.items()
        # torch counts a setting that was changed and restored as changed.
        if not config._is_default(name) and getattr(config, name) != entry.default
    ]


def is_compiled(model: torch.nn.Module) -> bool:
    """Return True if ``model`` is a result of ``torch.compile``."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; its Python id where it has no memory."""
    if tensor.layout is not torch.strided or tensor.numel() == 0 or isinstance(tensor, FakeTensor):
        return id(tensor)
    return tensor.data_ptr() or id(tensor)
