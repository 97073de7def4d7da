"""Private names of torch.autograd.Function, fake tensors and modes, and the versions tried.

| name | tried on |
| --- | --- |
| torch._C._FunctionBase.apply: a C function in a writable method table | 2.11-2.15.0 |
| torch.autograd.function.custom_function_call, called by Function.apply | 2.11-2.15.0 |
| torch.autograd.function._is_setup_context_defined | 2.11-2.15.0 |
| torch._subclasses.fake_tensor.FakeTensor, FakeTensorMode, unset_fake_temporarily | 2.11-2.15.0 |
| torch._ops.OpOverload, OpOverload._schema | 2.11-2.15.0 |
| torch.utils._python_dispatch.TorchDispatchMode | 2.11-2.15.0 |
| torch._C._functorch.is_functorch_wrapped_tensor | 2.11-2.15.0 |
| torch._C._storage_Use_Count, UntypedStorage._cdata, Tensor._base, Tensor._is_view | 2.11-2.15.0 |
| torch._C._ForceDispatchKeyGuard, _dispatch_tls_local_{include,exclude}_set, DispatchKey(Set) | 2.11-2.15.0 |
| torch._subclasses.functional_tensor.FunctionalTensor, torch._is_functional_tensor | 2.13.0 |
| torch.utils._python_dispatch._disable_current_modes, is_traceable_wrapper_subclass | 2.13.0 |
| UntypedStorage._new_with_weak_ptr | 2.13.0 |
| torch.fx.experimental.proxy_tensor._AttrProxy (get_base) | 2.13.0 |
| torch.nn.Module.__call__ and __getattr__ as torch.fx._symbolic_trace wraps them | 2.13.0 |
| torch._C._is_any_autocast_enabled | 2.11.0, 2.13.0 |
| Tensor._cdata; reference counts of tensors and storages, whose offsets are found by trial | 2.11-2.15.0 |
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch2ort import _native
from torch2ort._torch.autograd import version_of
from torch2ort._torch.dispatch import is_fake
from torch2ort.support.versions import need, private_names

with private_names("torch"):
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.autograd.function import _is_setup_context_defined
    from torch.fx.experimental.proxy_tensor import _AttrProxy
    from torch.utils._python_dispatch import (
        TorchDispatchMode,
        _disable_current_modes,
        is_traceable_wrapper_subclass,
    )

    _function: Any = torch.autograd.function
    _apply = torch._C._FunctionBase.apply  # type: ignore[attr-defined]
    _custom_function_call = _function.custom_function_call
    need(OpOverload, "_schema")
    need(torch.Tensor, "_base")
    _tensor: Any = torch.Tensor
    base_of, is_view = _tensor._base.__get__, _tensor._is_view
    need(torch._C._functorch, "is_functorch_wrapped_tensor")
    from torch._C import DispatchKey, DispatchKeySet

    need(torch, "_is_functional_tensor")
    need(torch.UntypedStorage, "_new_with_weak_ptr")
    need(torch._C, "_is_any_autocast_enabled")
    need(torch._C, "_ForceDispatchKeyGuard")
    need(torch._C, "_dispatch_tls_local_include_set")
    need(torch._C, "_dispatch_tls_local_exclude_set")
    _AUTOGRAD = [
        DispatchKeySet(getattr(DispatchKey, name))
        for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView")
    ]

# Replaces a call of a Function's `apply`, or returns NotImplemented: (the class, args, keyword args or None).
ApplyHook = Callable[[type, tuple[Any, ...], dict[str, Any] | None], Any]

__all__ = [
    "OpOverload",
    "TorchDispatchMode",
    "end_interception",
    "fake_mode",
    "intercept_apply",
    "is_autocast_on",
    "is_base_held",
    "is_fake",
    "is_functorch_wrapped",
    "is_plain",
    "makes_quantised",
    "positional",
    "storage_of",
    "use_count",
    "uses_setup_context",
    "version_of",
    "with_autograd",
    "without_fake_mode",
    "without_modes",
    "written_arguments",
]

_QUANTISING = re.compile(
    r"quantized::|aten::(quantize_per_|_make_per_|_?empty\w*_quantized|quantized_(batch_norm|max_pool))"
)

# True if autocast is on for any kind of device, also one that torch2ort does not know.
is_autocast_on = torch._C._is_any_autocast_enabled

# Up to torch 2.13 `Function.apply` is Python code, which binds defaults and keywords before it calls C code.
_BINDS_IN_PYTHON = isinstance(vars(torch.autograd.Function)["apply"], classmethod)


def with_autograd() -> AbstractContextManager[Any]:
    """Let autograd record operators also inside of an operator's fake kernel, where it is off by default."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for keys in _AUTOGRAD:
        excluded = excluded - keys
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def makes_quantised(operator: Any) -> bool:
    """Return True if an operator returns quantised tensors, which cannot be read from its fake results."""
    return isinstance(operator, OpOverload) and bool(_QUANTISING.match(operator._schema.name))


def intercept_apply(stand_in: ApplyHook) -> None:
    """Call ``stand_in`` first, at each call of any Function's ``apply`` on any thread.

    Every ``apply`` ends in the same C function, also one that was bound before as ``fn = MyFunction.apply``,
    one of a subclass and one in a library. Up to torch 2.13, a call inside a ``torch.func`` transform
    branches off before that C function, to a function that torch looks up by its name.

    Raises:
        RuntimeError: the C function cannot be reached.
    """
    _native.intercept(_apply, "apply", stand_in)

    def inside_transform(function: type, *args: Any, **kwargs: Any) -> Any:
        result = stand_in(function, args, kwargs)
        return _custom_function_call(function, *args, **kwargs) if result is NotImplemented else result

    _function.custom_function_call = inside_transform


def end_interception() -> None:
    """Undo :func:`intercept_apply`."""
    _function.custom_function_call = _custom_function_call
    _native.end_interception()


def positional(
    function: type[torch.autograd.Function], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> tuple[Any, ...]:
    """Return the arguments of ``apply`` as ``forward`` gets them: in order, with defaults if torch adds them.

    Raises:
        TypeError: they do not match ``forward``'s signature, or one has no position; with torch's wording.
    """
    context = () if uses_setup_context(function) else (None,)
    if context and not kwargs:
        return args
    named = kwargs or {}
    if _BINDS_IN_PYTHON and not context:
        if not named:
            return args
        raise _unexpected(next(iter(named)))
    bound = inspect.signature(function.forward).bind(*context, *args, **named)
    if not context:
        bound.apply_defaults()
    if bound.kwargs:
        raise _unexpected(next(iter(bound.kwargs)))
    return bound.args[len(context) :]


def _unexpected(name: str) -> TypeError:
    return TypeError(f"forward() got an unexpected keyword argument {name!r}")


# The reference count of the storage at an address; None where torch does not report it.
use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def tensors_of_known_memory() -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Return tensors over memory that torch allocated, and tensors over other memory."""
    with torch._C.DisableTorchFunction(), unset_fake_temporarily(), torch.inference_mode(False):
        own = tuple(torch.zeros(size, device="cpu", dtype=torch.uint8) for size in (1, 24, 5000))
        elsewhere = torch.utils.dlpack.from_dlpack(own[0].clone())
        foreign = (torch.frombuffer(bytearray(8), dtype=torch.uint8), elsewhere)
    return own, foreign


def is_base_held(tensor: torch.Tensor) -> bool:
    """Return True if anything but ``tensor`` may hold a reference to the tensor that it is a view of."""
    base = tensor._base
    return base is None or sys.getrefcount(base) > _free_base()


@functools.cache
def _free_base() -> int:
    view = (torch.ones(2) * 2).view(2)
    base = view._base
    return sys.getrefcount(base)


def uses_setup_context(function: type[torch.autograd.Function]) -> bool:
    """Return True if the Function is written in the ``setup_context`` style."""
    return bool(_is_setup_context_defined(function.setup_context))


def is_plain(value: Any) -> bool:
    """Return True if ``value`` is a tensor with data: not of a trace, nor of a subclass that wraps others."""
    if not isinstance(value, torch.Tensor) or isinstance(value, (FakeTensor, FunctionalTensor)):
        return False
    if value.layout is not torch.strided or value.is_nested or value.device.type == "meta":
        return False
    if torch.nn.parameter.is_lazy(value):
        return False
    traced = torch._is_functional_tensor(value) or is_functorch_wrapped(value)
    return not traced and not is_traceable_wrapper_subclass(value)


@functools.cache
def _attributes_of_fakes() -> frozenset[str]:
    with without_modes(), FakeTensorMode():
        return frozenset((*vars(torch.empty(0)), "elem", "_is_param"))


def users_attributes(tensor: torch.Tensor) -> list[str]:
    """Return the names of the attributes that code set on ``tensor``."""
    return [name for name in vars(tensor) if name not in _attributes_of_fakes()]


def own_module(value: Any) -> Any:
    """Return the module behind a trace's proxy; any other value unchanged."""
    proxy: Any = value
    return proxy.get_base() if isinstance(value, _AttrProxy) else value


@contextlib.contextmanager
def untraced_modules() -> Iterator[None]:
    """Let calls and attributes of modules bypass the trace, whose state is wrong after one raises."""
    kind: Any = torch.nn.Module
    wrapped = {
        name: method
        for name in ("__call__", "__getattr__")
        if (method := getattr(kind, name)).__globals__["__name__"] == "torch.fx._symbolic_trace"
    }
    try:
        for name, method in wrapped.items():
            setattr(kind, name, method.__wrapped__)
        yield
    finally:
        for name, method in wrapped.items():
            setattr(kind, name, method)


def storage_of(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """Return the storage of a weak reference; ``None`` if it was freed."""
    found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return found


def without_modes() -> AbstractContextManager[Any]:
    """Context in which operators run without a trace and without dispatch modes."""
    manager: AbstractContextManager[Any] = _disable_current_modes()
    return manager


def without_fake_mode() -> AbstractContextManager[Any]:
    """Context in which tensors are real again, inside of a fake kernel."""
    manager: AbstractContextManager[Any] = unset_fake_temporarily()
    return manager


def fake_mode() -> AbstractContextManager[Any]:
    """Context in which new tensors are fake: they have sizes but no data."""
    mode: AbstractContextManager[Any] = FakeTensorMode(allow_non_fake_inputs=True)
    return mode


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    """Return True if ``tensor`` is a wrapper of a running ``torch.func`` transform (vmap, grad, ...)."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def written_arguments(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operator call's arguments that the operator writes to."""
    if not operator._schema.is_mutable:
        return
    for i, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            for one in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(one, torch.Tensor):
                    yield one
