"""Every private name of torch that the package's top level touches, with the versions tried.

| name | tried on |
| --- | --- |
| ExportedProgram._guards_code | 2.11-2.15.0 |
| torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode | 2.11-2.15.0 |
| torch._subclasses.fake_tensor.DataDependentOutputException, DynamicOutputShapeException | 2.11-2.15.0 |
| torch._subclasses: fake_tensor.FakeTensor, functional_tensor.FunctionalTensor | 2.13.0 |
| torch._C._autograd._get_current_graph_task_keep_graph | 2.11-2.15.0 |
| torch.nn.modules.batchnorm._BatchNorm | 2.11-2.15.0 |
| torch.Tensor._version | 2.11-2.15.0 |
| torch.nn.Module._compiled_call_impl, what Module.__call__ calls if it is set | 2.13.0 |
| torch._dynamo.eval_frame.OptimizedModule, what torch.compile returns for a module | 2.13.0 |
| torch._C._functorch.peek_interpreter_stack | 2.13.0 |
| torch.autograd.forward_ad._current_level | 2.13.0 |
| torch.nn.modules.transformer._detect_is_causal_mask | 2.13.0 |
| torch._VF._pack_padded_sequence | 2.13.0 |
| torch._ops.OpOverload, OpOverload._schema | 2.11-2.15.0 |
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch

from torch2ort.versions import need, private_names

with private_names("torch"):
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
    )
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

    need(torch.Tensor, "_version")
    need(OpOverload, "_schema")
    need(torch._VF, "_pack_padded_sequence")
    need(torch.export.ExportedProgram, "_guards_code")
    need(torch._C._autograd, "_get_current_graph_task_keep_graph")
    need(torch.nn.Module, "_compiled_call_impl")
    need(torch._C._functorch, "peek_interpreter_stack")
    need(torch.autograd.forward_ad, "_current_level")
    need(torch.nn.modules.transformer, "_detect_is_causal_mask")

__all__ = [
    "DATA_DEPENDENT",
    "TRACED",
    "BatchNorm",
    "NeverCompiled",
    "OpOverload",
    "backward_keeps_graph",
    "in_forward_mode",
    "in_transform",
    "is_compiled",
    "mask_is_a_mask",
    "pack_padded_sequence",
    "size_guards",
    "version_of",
]

# What nn.utils.rnn.pack_padded_sequence calls.
pack_padded_sequence = torch._VF._pack_padded_sequence

# Raised where Python code of the model needs the value of a tensor: a branch, `.item()`, `int(tensor)`.
DATA_DEPENDENT: tuple[type[Exception], ...] = (
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
)


# What stands for a tensor while a model is traced.
TRACED: tuple[type[torch.Tensor], ...] = (FakeTensor, FunctionalTensor)


def size_guards(program: torch.export.ExportedProgram) -> list[str]:
    """Conditions on sizes that tracing relied on, as Python expressions over ``L['name'][i].size()[j]``."""
    return list(program._guards_code)


def backward_keeps_graph() -> bool:
    """Whether the backward now running was called with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def version_of(tensor: torch.Tensor) -> int:
    """Counter that every in-place write to ``tensor`` raises; 0 for one of inference mode, which has none."""
    return 0 if tensor.is_inference() else int(tensor._version)


class NeverCompiled:
    """A module whose calls run its own ``forward``, whatever ``Module.compile`` left in its dictionary."""

    # Module.__call__ looks here first. A data descriptor goes before the instance's dictionary.
    _compiled_call_impl = property(lambda self: None, lambda self, value: None)


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether ``model`` is what ``torch.compile`` returned."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)


@contextlib.contextmanager
def mask_is_a_mask() -> Iterator[None]:
    """Let transformers apply the masks that they get without looking whether they are causal."""
    transformer = torch.nn.modules.transformer
    detect = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = detect


def in_transform() -> bool:
    """Whether a torch.func transform (vmap, grad, jvp, ...) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is on."""
    return torch.autograd.forward_ad._current_level >= 0
