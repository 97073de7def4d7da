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
| torch.nn.Module.___needs_generation_tag_patch, by which it knows that it has | 2.11-2.13.0 |
| torch.nn.Module.___has_generation_tag_patch, by which a later one does | 2.14.1-2.15.0 |
| torch.fx.traceback.annotate, which torch.compiler.disable looks up at each call in an export | 2.11-2.15.0 |
| torch._dynamo, which an export imports, and with it what takes annotate by name | 2.11-2.15.0 |
| torch.fx._lazy_graph_module._use_lazy_graph_module | 2.13.0 |
| torch._C._set_grad_enabled, _InferenceMode, which torch.autograd.grad_mode calls | 2.11-2.15.0 |
| torch._dynamo.eval_frame.OptimizedModule, what torch.compile returns for a module | 2.13.0, 2.15.0 |
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

# Where the methods of torch.nn.Module that note each new module's age come from.
TAGGING = "torch._dynamo.mutation_guard"
# What it leaves on the class itself.
TAGGED = frozenset({"___needs_generation_tag_patch", "___has_generation_tag_patch"})

_CONFIGS = (
    "torch._dynamo.config",
    "torch._export.config",
    "torch._functorch.config",
    "torch.fx.experimental._config",
)

OPERATOR_TYPES: tuple[type, ...] = (OpOverload, OpOverloadPacket, CustomOpDef)
# What CustomOpDef knows of tensors without data, and of gradients.
FAKE_OF_DEFINITION = ("_abstract_fn",)
DERIVATIVE_OF_DEFINITION = ("_setup_context_fn", "_backward_fn")


def overloads(operator: Any) -> list[OpOverload]:
    """The overloads that one of :data:`OPERATOR_TYPES` stands for."""
    if isinstance(operator, OpOverload):
        return [operator]
    if isinstance(operator, CustomOpDef):
        return [operator._opoverload]
    return [getattr(operator, name) for name in operator.overloads()]


def operator_name(operator: Any) -> str:
    """``namespace.name`` or ``namespace.name.overload`` of one of :data:`OPERATOR_TYPES`."""
    return str(operator._opoverload if isinstance(operator, CustomOpDef) else operator)


def definition_of(name: str) -> CustomOpDef | None:
    """What ``torch.library.custom_op`` made for an operator, if that registered it."""
    return OPDEFS.get(name)


def fake_kernel_of(name: str) -> Any:
    """The Python function that was registered for an operator's tensors without data, or ``None``."""
    kernel = _registered.find(name).fake_impl.kernel
    return None if kernel is None else kernel.func


def has_derivative_in_python(name: str) -> bool:
    """Whether Python registered a kernel for autograd that no attribute of PyTorch's holds."""
    return (
        re.search(r"^Autograd\w*(\[alias\])?: registered at .*\.py:\d+ ", _dispatch_dump(name), re.M)
        is not None
    )


def code_written_when_read() -> contextlib.AbstractContextManager[None]:
    """Context in which a trace writes the Python code of its module when somebody reads or calls it."""
    return _use_lazy_graph_module(should_use=True)


def notes_of_this_thread() -> contextlib.AbstractContextManager[None]:
    """Keep other threads from noting something about the nodes that this one traces.

    While torch.export works, whatever torch.compiler.disable wraps (optimizers, checkpoints, an ORTModule)
    writes to a dictionary of the whole process, from any thread. The export replaces that dictionary for
    each node, so that either thread may end in a KeyError.
    """
    # What takes the function's name out of its module does so now, and not while another one stands there.
    importlib.import_module("torch._dynamo")
    annotate, tracing = _notes.annotate, threading.get_ident()

    def annotate_here(notes: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
        return annotate(notes) if threading.get_ident() == tracing else contextlib.nullcontext()

    return replaced(_notes, annotate=annotate_here)


def modes_set_by(
    gradients: Callable[[bool], None], inference: Callable[[bool], contextlib.AbstractContextManager[None]]
) -> contextlib.AbstractContextManager[None]:
    """Let ``torch.no_grad``, ``enable_grad``, ``set_grad_enabled`` and ``inference_mode`` call these."""
    return replaced(torch._C, _set_grad_enabled=gradients, _InferenceMode=inference)


def active_modes() -> tuple[Any, ...]:
    """Torch-function and dispatch modes that are entered on this thread."""
    if not _len_torch_function_stack() and not _len_torch_dispatch_stack():
        return ()  # as before each step of nearly all programs
    return (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())


def global_hook_tables() -> tuple[dict[int, Any], ...]:
    """Tables of the hooks that run around the forward or the backward of every module of the process."""
    return (
        _module._global_forward_pre_hooks,
        _module._global_forward_hooks,
        _module._global_backward_pre_hooks,
        _module._global_backward_hooks,
    )


def all_modules_have_backward_hooks() -> bool:
    """Whether somebody registered a hook on the gradients of every module of the process."""
    return bool(_module._global_backward_hooks or _module._global_backward_pre_hooks)


def global_hooks() -> list[Any]:
    """The hooks in these tables."""
    return [list(table.values()) for table in global_hook_tables()]


def changed_settings() -> list[str]:
    """Settings of torch's tracing that are not at their defaults."""
    # What was not imported yet has its defaults, and takes long to import.
    configs: dict[str, Any] = {name: sys.modules[name] for name in _CONFIGS if name in sys.modules}
    return [
        f"{module}.{name} = {getattr(config, name)!r}"
        for module, config in configs.items()
        for name, entry in config._config.items()
        # A setting that was changed and put back counts as changed to torch.
        if not config._is_default(name) and getattr(config, name) != entry.default
    ]


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether ``model`` is what ``torch.compile`` returned."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)


def address_of(tensor: torch.Tensor) -> int:
    """Where a tensor's memory begins; its own address where it has none."""
    if tensor.layout is not torch.strided or tensor.numel() == 0 or isinstance(tensor, FakeTensor):
        return id(tensor)
    return tensor.data_ptr() or id(tensor)
