"""Encoders of functions written in C, of generators behind ``with``, and of context variables."""

from __future__ import annotations

import contextvars
import hashlib
import inspect
import sys
import types
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch2ort.cache.key.constant_bytes import words
from torch2ort.cache.key.global_names import check_pure
from torch2ort.cache.key.key_builder import Unkeyable
from torch2ort.cache.key.packages import package_of_module

if TYPE_CHECKING:
    from torch2ort.cache.key.object_encoder import ObjectEncoder

# The attribute in which a context manager stores its generator.
_GENERATOR = words("gen")


def context_manager(encoder: ObjectEncoder, value: Any) -> None:
    """Write a context manager of ``contextlib.contextmanager``: its call, and whether that has begun."""
    if not isinstance(value.gen, types.GeneratorType):
        encoder.instance(value)
        return
    encoder.guard_value(lambda: inspect.getgeneratorstate(value.gen), value)
    encoder.walk.atom(inspect.getgeneratorstate(value.gen))
    call = vars(value)
    encoder.walk.guards.attributes(call, encoder.walk.place, skipped=_GENERATOR, always=True)
    # Entering the context deletes these attributes.
    if "func" in call:
        encoder.all(call["func"], call["args"], call["kwds"])


def builtin(encoder: ObjectEncoder, value: Any) -> None:
    """Write a function written in C, by its package or its file."""
    owner, module = value.__self__, value.__module__
    if isinstance(owner, ModuleType):
        module = owner.__name__
    elif not isinstance(module, str):
        encoder.all(owner, value.__name__)  # a method that is bound to an object
        return
    package = package_of_module(module)
    if package is not None:
        encoder.definitions.package(package, module)
        encoder.walk.check(check_pure, package, value)
    else:
        encoder.walk.refer(f"extension {module}", ("extension", module), lambda: _file_digest(module))
    encoder.walk.atom(f"{module}.{value.__qualname__}")


def context_variable(encoder: ObjectEncoder, variable: contextvars.ContextVar[Any]) -> None:
    """Write a context variable and its content."""
    nothing = object()
    encoder.guard_value(lambda: id(variable.get(nothing)), variable)
    encoder.walk.atom(variable.name)
    content = variable.get(nothing)
    encoder.walk.guards.pin(content)
    if content is not nothing:
        encoder.write(content)


def _file_digest(module: str) -> str:
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        raise Unkeyable(f"the module {module} has no file that could be compared between processes")
    with open(file, "rb") as stream:
        return hashlib.sha256(stream.read()).hexdigest()
