"""Snapshot of the state that a model's forward can reach and change, as it is before a call."""

from __future__ import annotations

import contextvars
import functools
import itertools
import operator
import queue
import random
import re
import threading
import types
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import numpy as np
import torch

from torch2ort.cache import global_hook_tables
from torch2ort.cache.key.constant_bytes import words
from torch2ort.cache.key.packages import package_of_module
from torch2ort.pythonop.abstract_run.object_snapshot import Holder, Named, Snapshot, names_global
from torch2ort.support.install_paths import is_pythons_module

# Modules of the standard library with classes whose instances contain a user's data.
_CARRIERS = words(
    """_thread argparse array builtins collections configparser contextlib ctypes dataclasses enum functools
    types"""
)
_ITERATORS: tuple[type, ...] = (
    itertools.count, itertools.cycle, types.GeneratorType, type(iter([])), type(iter(())),
    type(iter(range(1))), type(iter({})), type(iter(set())),
)  # fmt: skip
_NO_HINT = -1
HOOKS_OF_ALL = "hooks of all modules"


class NativeState(Holder[Any]):
    """An object written in C whose state advances when it is used."""


class GeneratorState(NativeState):
    """A random generator."""

    def read(self) -> Any:
        """See :meth:`Holder.read`."""
        value = self.value
        if isinstance(value, random.Random):
            return value.getstate()
        if isinstance(value, torch.Generator):
            return value.get_state()
        state = value.get_state(legacy=False) if isinstance(value, np.random.RandomState) else None
        return state if state is not None else value.bit_generator.state

    def write(self, contents: Any) -> None:
        """See :meth:`Holder.write`."""
        value = self.value
        if isinstance(value, random.Random):
            value.setstate(contents)
        elif isinstance(value, (torch.Generator, np.random.RandomState)):
            value.set_state(contents)
        else:
            value.bit_generator.state = contents

    def same(self, contents: Any) -> bool:
        """See :meth:`Holder.same`."""
        return bool(repr_of(contents) == repr_of(self.before))


class IrreversibleState(NativeState):
    """An object whose state cannot be restored."""

    def write(self, contents: Any) -> None:
        """See :meth:`Holder.write`."""

    def same(self, contents: Any) -> bool:
        """See :meth:`Holder.same`."""
        return bool(contents == self.before)


class IteratorPosition(IrreversibleState):
    """An iterator."""

    def read(self) -> Any:
        """See :meth:`Holder.read`."""
        value = self.value
        if isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            return frame and (frame.f_lasti, {name: id(held) for name, held in frame.f_locals.items()})
        if isinstance(value, itertools.count):
            return repr(value)
        return operator.length_hint(_inner(value), _NO_HINT)


def _inner(value: Any) -> Any:
    """Return the iterable of an ``itertools.cycle``, where Python exposes it."""
    if not isinstance(value, itertools.cycle):
        return value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return value.__reduce__()[1][0]
        except TypeError:
            return value


class ContextVariable(NativeState):
    """A ``contextvars.ContextVar``."""

    def read(self) -> Any:
        """See :meth:`Holder.read`."""
        return self.value.get(None)

    def write(self, contents: Any) -> None:
        """See :meth:`Holder.write`."""
        self.value.set(contents)

    def same(self, contents: Any) -> bool:
        """See :meth:`Holder.same`."""
        return contents is self.before


class SynchronizationState(IrreversibleState):
    """An object by which threads exchange values or signals; its state is not restored."""

    def read(self) -> Any:
        """See :meth:`Holder.read`."""
        value = self.value
        if isinstance(value, queue.Queue):
            return value.qsize(), value.unfinished_tasks
        return value.is_set() if isinstance(value, threading.Event) else value._value


def repr_of(state: Any) -> Any:
    """Return a generator's state in a form that can be compared."""
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    if isinstance(state, dict):
        return {key: repr_of(value) for key, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


class Defaults(Named):
    """The defaults of a function, in which hooks often store the list that they fill."""

    def read(self) -> dict[Any, Any]:
        """See :meth:`Holder.read`."""
        return dict(enumerate(self.value.__defaults__ or ()))

    def write(self, contents: dict[Any, Any]) -> None:
        """See :meth:`Holder.write`."""
        self.value.__defaults__ = tuple(contents.values())

    def label(self, key: Any) -> str:
        """See :meth:`Named.label`."""
        code = self.value.__code__
        names = code.co_varnames[: code.co_argcount][-len(self.before) :]
        return f"the default {names[key]} of {self.value.__qualname__}"


class PartialArguments(Named):
    """The arguments that a ``functools.partial`` stores."""

    def read(self) -> dict[Any, Any]:
        """See :meth:`Holder.read`."""
        return {**dict(enumerate(self.value.args)), **self.value.keywords}

    def write(self, contents: dict[Any, Any]) -> None:
        """See :meth:`Holder.write`."""
        value = self.value
        args = tuple(v for k, v in contents.items() if isinstance(k, int))
        keywords = {k: v for k, v in contents.items() if isinstance(k, str)}
        value.__setstate__((value.func, args, keywords, vars(value)))


class ReachableState(Snapshot):
    """The objects that the code of a model reaches, without the private state of installed packages.

    Args:
        model: the model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        hooks = [(HOOKS_OF_ALL, table) for table in global_hook_tables()]
        super().__init__([(type(model).__name__, model), *hooks])

    def was_there(self, value: Any) -> bool:
        """Return True if ``value`` was found."""
        return id(value) in self._found

    def of(self, value: Any) -> list[Holder[Any]]:
        """Return the places whose object is ``value``."""
        return [holder for holder in self.holders if holder.value is value]

    def _is_foreign(self, module: str | None) -> bool:
        if super()._is_foreign(module):
            return True
        return module is not None and package_of_module(module) is not None

    def _visit(self, path: str, value: Any) -> None:
        if isinstance(value, _GENERATORS):
            self._keep(value, GeneratorState, path)
        elif isinstance(value, contextvars.ContextVar):
            self._keep(value, ContextVariable, path)
        elif isinstance(value, _ITERATORS):
            self._keep(value, IteratorPosition, path)
        elif isinstance(value, _SHARED):
            self._keep(value, SynchronizationState, path)
        elif isinstance(value, SynchronizedBase):
            self._pending.append((path, value.get_obj()))
        elif type(value) is functools.partial and id(value) not in self._found:
            self._found.add(id(value))
            self._alive.append(value)
            self._hold(PartialArguments(path, value))
            self._pending.append((path, value.func))
        else:
            super()._visit(path, value)

    def _visit_function(self, function: types.FunctionType) -> None:
        super()._visit_function(function)
        if function.__defaults__ and not self._is_foreign(function.__module__):
            self._hold(Defaults(f"a default of {function.__qualname__}", function))

    def _keep(self, value: Any, kind: Callable[[str, Any], Holder[Any]], path: str) -> None:
        if id(value) not in self._found:
            self._found.add(id(value))
            self._alive.append(value)
            self.holders.append(kind(path, value))

    def _visit_object(self, path: str, value: Any) -> None:
        module = type(value).__module__
        carries = module.partition(".")[0] in _CARRIERS or isinstance(value, (dict, list))
        if carries or not is_pythons_module(module):
            super()._visit_object(path, value)


class FunctionState(ReachableState):
    """The objects that a call of a Function reaches, also for a library's Function.

    Args:
        name: name of the Function.
        function: the Function.
        constants: its arguments that are no tensors, by position.

    Attributes:
        asks_for_types: the globals of code that uses ``type``, where that is Python's own.
    """

    def __init__(self, name: str, function: Any, constants: Mapping[int, Any]) -> None:
        self.asks_for_types: list[dict[str, Any]] = []
        arguments = ((f"argument {position}", value) for position, value in constants.items())
        Snapshot.__init__(self, [(name.rpartition(".")[2], function), *arguments])

    def _is_foreign(self, module: str | None) -> bool:
        return Snapshot._is_foreign(self, module)

    def _visit_function(self, function: types.FunctionType) -> None:
        super()._visit_function(function)
        names = function.__globals__
        known = any(names is other for other in self.asks_for_types)
        if not known and "type" not in names and names_global(function, "type"):
            self.asks_for_types.append(names)


_SHARED: tuple[type, ...] = (queue.Queue, threading.Event, threading.Semaphore)
_GENERATORS: tuple[type, ...] = (
    random.Random, np.random.RandomState, np.random.Generator, torch.Generator,
)  # fmt: skip


def readable(path: str) -> str:
    """Convert a place to the form that users write: ``Model.blocks.0.aux``."""
    path = re.sub(r"\._(?:modules|buffers|parameters)\['([^']*)'\]", r".\1", path)
    return path
