"""Every private name of torch that torch2ort.pythonop touches, with the versions tried.

| name | tried on |
| --- | --- |
| torch.autograd.function._SingleLevelFunction, _is_setup_context_defined | 2.13.0 |
| torch._subclasses.fake_tensor.FakeTensor, unset_fake_temporarily | 2.13.0 |
| torch.Tensor._version | 2.13.0 |
| SymInt.node.hint, SymNode.hint | 2.13.0 |
| torch._C._functorch.is_functorch_wrapped_tensor | 2.13.0 |
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.autograd.function import _is_setup_context_defined, _SingleLevelFunction

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


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a ``torch.func`` transform (vmap, grad, ...) is at work on ``tensor``."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))
