"""Private names of torch.export, and the versions tried.

| name | tried on |
| --- | --- |
| ExportedProgram._guards_code | 2.11-2.15.0 |
| torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode | 2.11-2.15.0 |
| torch._subclasses.fake_tensor.DataDependentOutputException, DynamicOutputShapeException | 2.11-2.15.0 |
| torch._subclasses.fake_tensor.UnsupportedOperatorException, text of CustomOpDef's error | 2.11-2.15.0 |
| torch.nn.modules.batchnorm._BatchNorm | 2.11-2.15.0 |
| torch.nn.modules.transformer._detect_is_causal_mask | 2.13.0, 2.15.0 |
| torch._VF._pack_padded_sequence | 2.13.0, 2.15.0 |
| torch._is_all_true, torch._assert_async | 2.11.0, 2.13.0 |
| torch._ops.OpOverload, OpOverload._schema | 2.11-2.15.0 |
| torch.nn.modules.module._global_buffer_registration_hooks | 2.11-2.15.0 |
| torch.nn.modules.module._global_backward_hooks, _global_backward_pre_hooks | 2.11-2.15.0 |
| torch.overrides._get_current_function_mode_stack | 2.11-2.15.0 |
| torch.amp._enter_autocast, _exit_autocast; PreDispatchTorchFunctionMode, which records them | 2.11-2.15.0 |
| torch._functorch._aot_autograd.utils, whose hook on buffers a failed export does not remove | 2.11.0 |
| torch.export._trace, which prints a trace's progress | 2.13.0, 2.15.0 |
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

from torch2ort.support.replaced import replaced
from torch2ort.support.versions import need, private_names

with private_names("torch"):
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    )
    from torch.export import _trace as export_trace
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

    need(OpOverload, "_schema")
    need(torch.amp, "_enter_autocast", "_exit_autocast")
    need(torch.overrides, "_get_current_function_mode_stack")
    need(torch._VF, "_pack_padded_sequence")
    need(torch, "_is_all_true", "_assert_async")
    need(torch.export.ExportedProgram, "_guards_code")
    need(torch.nn.modules.transformer, "_detect_is_causal_mask")
    need(torch.nn.modules.module, "_global_buffer_registration_hooks")
    need(torch.nn.modules.module, "_global_backward_hooks", "_global_backward_pre_hooks")

__all__ = [
    "DATA_DEPENDENT",
    "BatchNorm",
    "OpOverload",
    "assert_true",
    "is_all_true",
    "mask_is_a_mask",
    "no_autocast_nodes",
    "no_graph_printed",
    "no_hooks_left",
    "nodes_noted",
    "pack_padded_sequence",
    "size_guards",
    "without_fake_kernel",
]


_ENTER, _EXIT = (getattr(torch.amp, name) for name in ("_enter_autocast", "_exit_autocast"))

# The function that nn.utils.rnn.pack_padded_sequence calls.
pack_padded_sequence = torch._VF._pack_padded_sequence
# The function by which torch.distributions checks values, and the one by which a graph can check them.
is_all_true = torch._is_all_true
assert_true: Callable[[torch.Tensor, str], None] = torch._assert_async


# Raised where Python code of the model needs the value of a tensor: a branch, `.item()`, `int(tensor)`.
DATA_DEPENDENT: tuple[type[Exception], ...] = (
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
)


def without_fake_kernel(error: BaseException) -> str | None:
    """Return the name of the operator without a fake kernel that ``error`` reports; ``None`` for others."""
    if isinstance(error, UnsupportedOperatorException):
        return str(error.func.name())
    found = re.match(r"There was no fake impl registered for <CustomOpDef\((\S+)\)>", str(error))
    return None if found is None else found[1]


def size_guards(program: torch.export.ExportedProgram) -> list[str]:
    """Return the size conditions that tracing assumed, as Python code over ``L['name'][i].size()[j]``."""
    return list(program._guards_code)


@contextlib.contextmanager
def no_hooks_left() -> Iterator[None]:
    """Remove the global module hook that torch.export of torch 2.11 leaves behind when it fails.

    The hook holds the model, so every later model would depend on that model.
    """
    hooks = torch.nn.modules.module._global_buffer_registration_hooks
    before = set(hooks)
    try:
        yield
    finally:
        for key in set(hooks) - before:
            if getattr(hooks[key], "__module__", "") == "torch._functorch._aot_autograd.utils":
                del hooks[key]


def no_graph_printed() -> contextlib.AbstractContextManager[None]:
    """Keep torch.export, in this thread, from printing its graph to stderr where code reads a value."""
    thread = threading.get_ident()
    before = getattr(export_trace, "print", builtins.print)

    def printed(*values: Any, **settings: Any) -> None:
        if threading.get_ident() != thread:
            before(*values, **settings)

    export_trace.print = before  # type: ignore[attr-defined]
    return replaced(export_trace, print=printed)


def mask_is_a_mask() -> contextlib.AbstractContextManager[None]:
    """Let transformers apply the masks that they are passed without a check for causal masks."""
    return replaced(
        torch.nn.modules.transformer,
        _detect_is_causal_mask=lambda mask, is_causal=None, size=None: is_causal is True,
    )


def nodes_noted(note: Callable[[torch.fx.Node], None]) -> contextlib.AbstractContextManager[None]:
    """Call ``note`` with each node that a trace creates inside of the context."""
    create = torch.fx.Graph.create_node

    @functools.wraps(create)
    def create_node(self: torch.fx.Graph, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = create(self, *args, **kwargs)
        note(node)
        return node

    return replaced(torch.fx.Graph, create_node=create_node)


def no_autocast_nodes(ended: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Keep a trace from recording the begin and end of autocast regions, which torch.export splits off.

    torch.export loses autocast in a region without gradients that is inside of an autocast region.

    Args:
        ended: called at the end of each outermost region.
    """
    recorded = PreDispatchTorchFunctionMode.__torch_function__

    def torch_function(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _ENTER and func is not _EXIT:
            return recorded(self, func, types, args, kwargs)
        # The code itself calls it, as dynamo's graphs do: torch removed this mode, autocast is not set yet.
        called = self not in torch.overrides._get_current_function_mode_stack()
        result = func(*args, **(kwargs or {})) if called else None
        torch.autocast_increment_nesting()
        if torch.autocast_decrement_nesting() == 0:
            ended()
        return result

    return replaced(PreDispatchTorchFunctionMode, __torch_function__=torch_function)
