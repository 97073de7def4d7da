"""Every private name of torch that torch2ort.pythonop touches, with the versions tried.

| name | tried on |
| --- | --- |
| torch.autograd.function._SingleLevelFunction, _is_setup_context_defined | 2.13.0 |
| torch._subclasses.fake_tensor.FakeTensor, FakeTensorMode, unset_fake_temporarily | 2.13.0 |
| torch.Tensor._version | 2.13.0 |
| torch._ops.OpOverload, OpOverload._schema | 2.13.0 |
| torch.utils._python_dispatch.TorchDispatchMode | 2.13.0 |
| SymInt.node.hint, SymInt.node.expr | 2.13.0 |
| FakeTensor.fake_mode, FakeTensorMode.shape_env | 2.13.0 |
| ShapeEnv.source_name_to_debug_name, source_to_var, create_symintnode | 2.13.0 |
| torch._C._functorch.is_functorch_wrapped_tensor | 2.13.0 |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import sympy
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.function import _is_setup_context_defined, _SingleLevelFunction
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "APPLY_OWNER",
    "OpOverload",
    "TorchDispatchMode",
    "environment",
    "expression",
    "fake_mode",
    "has_hint",
    "is_fake",
    "is_functorch_wrapped",
    "named_symbols",
    "original_apply",
    "size_hint",
    "size_of",
    "uses_setup_context",
    "version_of",
    "without_fake_mode",
    "written_arguments",
]

# `Function.apply` ends in `super().apply`, which looks the method up on this class: setting it here
# also reaches `fn = MyFunction.apply` bound before the export.
APPLY_OWNER: type = _SingleLevelFunction


def original_apply(function: type, *args: Any, **kwargs: Any) -> Any:
    """``Function.apply`` as torch has it, while an interceptor stands in front of it."""
    return super(_SingleLevelFunction, function).apply(*args, **kwargs)  # type: ignore[misc]


def uses_setup_context(function: type[torch.autograd.Function]) -> bool:
    """Whether the Function is written in the ``setup_context`` style."""
    return bool(_is_setup_context_defined(function.setup_context))


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a FakeTensor."""
    return isinstance(tensor, FakeTensor)


def without_fake_mode() -> AbstractContextManager[Any]:
    """Context in which tensors are real again, inside a fake kernel."""
    manager: AbstractContextManager[Any] = unset_fake_temporarily()
    return manager


def version_of(tensor: torch.Tensor) -> int:
    """Counter that every in-place write to ``tensor`` raises."""
    return int(tensor._version)


def size_hint(size: int | torch.SymInt) -> int:
    """The number that a symbolic size had in the sample; 2 where it has none."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 2 if hint is None else int(hint)


def has_hint(size: int | torch.SymInt) -> bool:
    """Whether the sample says which number a size was."""
    return isinstance(size, int) or size.node.hint is not None


def expression(size: torch.SymInt) -> sympy.Expr:
    """What torch knows of a symbolic size, over symbols of torch's own."""
    return size.node.expr


def environment(tensor: torch.Tensor) -> Any:
    """Where torch keeps the symbols of the trace that ``tensor`` is of; ``None`` if it is of none."""
    return tensor.fake_mode.shape_env if isinstance(tensor, FakeTensor) else None


def named_symbols(environment: Any) -> dict[sympy.Symbol, str]:
    """Symbols of one trace that stand for a named dimension -> the name, or the expression of names."""
    names = environment.source_name_to_debug_name
    return {
        variable: names[source]
        for source, variable in environment.source_to_var.items()
        if names.get(source) is not None and variable.is_Symbol
    }


def size_of(symbol: sympy.Symbol, environment: Any) -> int | torch.SymInt:
    """The size that ``symbol`` stands for in a trace."""
    size: int | torch.SymInt = environment.create_symintnode(symbol, hint=None)
    return size


def fake_mode() -> AbstractContextManager[Any]:
    """Context in which new tensors are fake, and have sizes but no data."""
    mode: AbstractContextManager[Any] = FakeTensorMode(allow_non_fake_inputs=True)
    return mode


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a ``torch.func`` transform (vmap, grad, ...) is at work on ``tensor``."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def written_arguments(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    """The tensors among an operator call's arguments that the operator writes to."""
    if not operator._schema.is_mutable:
        return
    for i, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            for one in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(one, torch.Tensor):
                    yield one
