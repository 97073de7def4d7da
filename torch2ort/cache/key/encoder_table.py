"""The encoder of each type of value that a model's code can reach."""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import functools
import logging
import re
import threading
import types
import typing
import weakref
from collections.abc import Callable
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torch2ort._torch import global_state as private
from torch2ort.cache.key import callable_encoders as callables
from torch2ort.cache.key import container_encoders as containers
from torch2ort.cache.key import tensor_encoders as tensors
from torch2ort.cache.key.library_operators import write_operator
from torch2ort.cache.key.module_encoder import module
from torch2ort.pythonop.abstract_run.opaque_objects import FOREIGN

if TYPE_CHECKING:
    from torch2ort.cache.key.object_encoder import ObjectEncoder

    Encode = Callable[[ObjectEncoder, Any], None]

_Pair = collections.namedtuple("_Pair", "first second")


def _parts(*names: str) -> Encode:
    """Return the encoder of objects that consist of these attributes."""
    return lambda encoder, value: encoder.all(*(getattr(value, name) for name in names))


def _text(of: Callable[[Any], Any]) -> Encode:
    """Return the encoder of objects that a plain value identifies."""
    return lambda encoder, value: encoder.walk.atom(of(value))


_PARTS: dict[tuple[Any, ...], tuple[str, ...]] = {
    (MethodType,): ("__self__", "__func__"),
    (types.MethodWrapperType,): ("__self__", "__name__"),
    (functools.partial, functools.partialmethod): ("func", "args", "keywords"),
    (functools.cached_property,): ("func", "attrname"),
    (property,): ("fget", "fset", "fdel"),
    (staticmethod, classmethod): ("__func__",),
    (re.Pattern,): ("pattern", "flags"),
    tuple(map(type, ({}.keys(), {}.values(), {}.items()))): ("mapping",),
}
_SHOWN: tuple[Any, ...] = (
    types.GenericAlias,
    types.UnionType,
    typing.TypeVar,
    typing.ParamSpec,
    *(kind for kind in vars(typing).values() if isinstance(kind, type) and kind.__name__.startswith("_")),
)
_OF_CLASSES: tuple[Any, ...] = (
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_OPAQUE: tuple[Any, ...] = (object, type(threading.Lock()), type(threading.RLock()))

# A value's exact type -> its encoder.
EXACT: dict[Any, Encode] = {
    **dict.fromkeys((list, collections.deque), containers.items),
    **dict.fromkeys((dict, types.MappingProxyType), containers.mapping),
    **dict.fromkeys((bytearray, memoryview, array.array), containers.memory),
    **{kind: _parts(*names) for kinds, names in _PARTS.items() for kind in kinds},
    FunctionType: lambda encoder, value: encoder.definitions.function(value),
    BuiltinFunctionType: callables.builtin,
    type(contextlib.contextmanager(lambda: iter(()))()): callables.context_manager,
    contextvars.ContextVar: callables.context_variable,
    weakref.ref: lambda encoder, value: encoder.write(value()),
    type(functools.lru_cache(lambda: None)): lambda encoder, value: encoder.all(
        value.__wrapped__, value.cache_parameters()
    ),
    logging.Logger: _text(lambda v: v.name),
    np.ndarray: tensors.array,
    np.ufunc: _text(lambda v: v.__name__),
    type(np.sum): _text(lambda v: f"{v.__module__}.{v.__qualname__}"),
    # A named tuple's class has a descriptor of this type for each of its fields.
    type(vars(_Pair)["first"]): _text(lambda v: v.__reduce__()[1]),
    **dict.fromkeys(
        private.OPERATOR_TYPES, lambda encoder, value: write_operator(encoder.walk, value, encoder.write)
    ),
    **dict.fromkeys(_OF_CLASSES, _text(lambda v: f"{v.__objclass__.__qualname__}.{v.__name__}")),
    **dict.fromkeys(_SHOWN, _text(repr)),
    **dict.fromkeys(_OPAQUE, _text(lambda v: type(v).__name__)),
}

# Classes -> the encoder of instances of them and of their subclasses. The first match counts.
INHERITED: tuple[tuple[Any, Encode], ...] = (
    (type, lambda encoder, value: encoder.definitions.class_(value, used_as_value=True)),
    (torch.Tensor, tensors.tensor),
    (torch.nn.Module, module),
    (ModuleType, lambda encoder, value: encoder.definitions.module(value)),
    ((dict, list, tuple, set, frozenset, str, int, float, bytes), containers.subclass_of_container),
    (PurePath, _text(str)),
    (np.ndarray, tensors.subclass_of_array),
    (FOREIGN, tensors.foreign),
)
