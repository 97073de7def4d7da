"""Snapshots of the Python state that code can reach, to find changes and to undo them.

The state is found from some roots: the content of containers, objects, classes and closures, and the
globals that functions name. Code that runs on tensors of an export must leave none of them, nor their
numbers, behind.
"""

from __future__ import annotations

import array
import collections
import contextlib
import ctypes
import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from torch2ort.errors import ExportError
from torch2ort.pythonop.abstract_run.opaque_objects import DISTRIBUTIONS, FOREIGN
from torch2ort.support.install_paths import is_pythons_module

# Largest number of holders in a snapshot: a Function writes to objects near to it.
_MOST = 50_000
# The items of longer sequences are saved but not followed.
_LONG = 1_000
# Arrays of more bytes are not copied.
_LARGE = 1 << 24

# Libraries that contain no state of the user; they manage their own.
_LIBRARIES = {
    "_pytest", "hypothesis", "mpmath", "numpy", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "optree",
    "pluggy", "pytest", "sympy", "torch", "torch2ort",
}  # fmt: skip
_PLAIN = (
    bool, bytes, complex, float, int, str, type(None), range, slice, np.generic, torch.Size, torch.device,
    torch.dtype, types.BuiltinFunctionType, types.CodeType, types.FrameType, types.GeneratorType,
)  # fmt: skip
_MEMO = type(functools.lru_cache(len))
_ABSENT: Any = object()

_Contents = TypeVar("_Contents")


class Holder(Generic[_Contents]):
    """One place that contains other values, with its content when it was found.

    Attributes:
        path: path of the place, for messages.
        value: the object that is the place.
        before: the content when it was found.
    """

    def __init__(self, path: str, value: Any) -> None:
        self.path, self.value = path, value
        self.before: _Contents = self.read()

    @property
    def key(self) -> tuple[int, str]:
        """A value that is different for different places."""
        return id(self.value), type(self).__name__

    def read(self) -> _Contents:
        """Return a copy of the present content."""
        raise NotImplementedError

    def write(self, contents: _Contents) -> None:
        """Set the content to ``contents``."""
        raise NotImplementedError

    def same(self, contents: _Contents) -> bool:
        """Return True if ``contents`` are the very same objects as :attr:`before`."""
        raise NotImplementedError

    def same_as(self, before: _Contents, contents: _Contents) -> bool:
        """Return True if ``contents`` are the very same objects as ``before``."""
        held, self.before = self.before, before
        try:
            return self.same(contents)
        finally:
            self.before = held

    def parts(self) -> Iterator[tuple[str, Any]]:
        """Return path and value of each object in :attr:`before`."""
        return iter(())


class Named(Holder[dict[Any, Any]]):
    """A place whose values have keys: a dict, an object's attributes, a closure, some of the globals."""

    def same(self, contents: dict[Any, Any]) -> bool:
        """See :meth:`Holder.same`."""
        before = self.before
        return len(contents) == len(before) and all(contents.get(k, _ABSENT) is v for k, v in before.items())

    @property
    def entries(self) -> Any:
        """The dictionary behind the place, if there is one; otherwise the place's object."""
        return self.value

    def label(self, key: Any) -> str:
        """Return the path of the value of ``key``."""
        return f"{self.path}[{key!r}]"

    def parts(self) -> Iterator[tuple[str, Any]]:
        """See :meth:`Holder.parts`."""
        if len(self.before) <= _LONG:
            yield from ((self.label(key), value) for key, value in self.before.items())


class _Dict(Named):
    def read(self) -> dict[Any, Any]:
        return dict(built_in(self.value).items(self.value))

    def write(self, contents: dict[Any, Any]) -> None:
        base = built_in(self.value)
        base.clear(self.value)
        base.update(self.value, contents)


class _Attributes(Named):
    """``value`` is an object with attributes of its own."""

    def read(self) -> dict[Any, Any]:
        return dict(self.entries)

    def write(self, contents: dict[Any, Any]) -> None:
        attributes = self.entries
        attributes.clear()
        attributes.update(contents)

    @property
    def entries(self) -> Any:
        """See :attr:`Named.entries`."""
        return attributes_of(self.value)

    def label(self, key: Any) -> str:
        return f"{self.path}.{key}"


class _Slots(Named):
    def read(self) -> dict[Any, Any]:
        found = {}
        for name in _slots_of(type(self.value)):
            with contextlib.suppress(AttributeError):  # a slot that was never assigned
                found[name] = object.__getattribute__(self.value, name)
        return found

    def write(self, contents: dict[Any, Any]) -> None:
        now = self.read()
        for name in now.keys() - contents.keys():
            object.__delattr__(self.value, name)
        for name, value in contents.items():
            if now.get(name, _ABSENT) is not value:
                object.__setattr__(self.value, name, value)

    def label(self, key: Any) -> str:
        return f"{self.path}.{key}"


class _Class(Named):
    """The data among a class's attributes."""

    def read(self) -> dict[Any, Any]:
        return {name: value for name, value in vars(self.value).items() if not name.startswith("__")}

    def write(self, contents: dict[Any, Any]) -> None:
        now = self.read()
        for name in now.keys() - contents.keys():
            type.__delattr__(self.value, name)
        for name, value in contents.items():
            if now.get(name, _ABSENT) is not value:
                type.__setattr__(self.value, name, value)

    def label(self, key: Any) -> str:
        return f"{self.path}.{key}"


class _Cell(Named):
    def read(self) -> dict[Any, Any]:
        try:
            return {"": self.value.cell_contents}
        except ValueError:
            return {}

    def write(self, contents: dict[Any, Any]) -> None:
        if contents:
            self.value.cell_contents = contents[""]
        elif self.read():
            del self.value.cell_contents

    def label(self, key: Any) -> str:
        return self.path


class _Global(Named):
    """One name of a module; ``value`` is the module's dict and the name."""

    @property
    def key(self) -> tuple[int, str]:
        values, name = self.value
        return id(values), name

    def read(self) -> dict[Any, Any]:
        values, name = self.value
        return {name: values[name]} if name in values else {}

    def write(self, contents: dict[Any, Any]) -> None:
        values, name = self.value
        if name in contents:
            values[name] = contents[name]
        else:
            values.pop(name, None)

    def label(self, key: Any) -> str:
        return f"the global {key}"


class Items(Holder[list[Any]]):
    """A list or a deque."""

    def read(self) -> list[Any]:
        """See :meth:`Holder.read`."""
        return list(built_in(self.value).__iter__(self.value))

    def write(self, contents: list[Any]) -> None:
        """See :meth:`Holder.write`."""
        base = built_in(self.value)
        base.clear(self.value)
        base.extend(self.value, contents)

    def same(self, contents: list[Any]) -> bool:
        """See :meth:`Holder.same`."""
        return len(contents) == len(self.before) and all(map(_is, contents, self.before))

    def parts(self) -> Iterator[tuple[str, Any]]:
        """See :meth:`Holder.parts`."""
        if len(self.before) <= _LONG:
            yield from ((f"{self.path}[{i}]", value) for i, value in enumerate(self.before))


class _Set(Holder[set[Any]]):
    def read(self) -> set[Any]:
        return set(set.__iter__(self.value))

    def write(self, contents: set[Any]) -> None:
        set.clear(self.value)
        set.update(self.value, contents)

    def same(self, contents: set[Any]) -> bool:
        return contents == self.before


class _Bytes(Holder[bytes]):
    """A bytearray, or an array of numbers."""

    def read(self) -> bytes:
        return bytes(memoryview(self.value))

    def write(self, contents: bytes) -> None:
        numbers = isinstance(self.value, array.array)
        self.value[:] = array.array(self.value.typecode, contents) if numbers else contents

    def same(self, contents: bytes) -> bool:
        return contents == self.before


class _Foreign(_Bytes):
    """A C value, whose memory is not moved."""

    def write(self, contents: bytes) -> None:
        ctypes.memmove(ctypes.addressof(self.value), contents, len(contents))


class _Array(Holder[Any]):
    def read(self) -> Any:
        return self.value.copy()

    def write(self, contents: Any) -> None:
        self.value[...] = contents

    def same(self, contents: Any) -> bool:
        return bool(contents.tobytes() == self.before.tobytes())


class _Memo(Holder[int]):
    """A function behind ``functools.lru_cache``; to undo new entries, the whole cache is cleared."""

    def read(self) -> int:
        return int(self.value.cache_info().misses)

    def write(self, contents: int) -> None:
        self.value.cache_clear()

    def same(self, contents: int) -> bool:
        return contents == self.before


class Snapshot:
    """The present state of everything that is reachable from some roots.

    Args:
        roots: paths, for messages, and values.
        code: True if objects that functions and classes reach count, too; otherwise only the content of
            objects.

    Attributes:
        holders: the places that were found.

    Raises:
        ExportError: an object of the user raised while it was inspected.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]], *, code: bool = True) -> None:
        self._code = code
        self.holders: list[Holder[Any]] = []
        self._found: set[int] = set()
        self._used: set[tuple[int, str]] = set()
        # The objects found are kept alive, so that no other object gets their ids.
        self._alive: list[Any] = []
        self._pending = collections.deque(roots)
        while self._pending and len(self.holders) < _MOST:
            path, value = self._pending.popleft()
            try:
                self._visit(path, value)
            except Exception as error:  # a class of the user may raise when it is inspected
                raise ExportError(
                    f"looking at {path} raised {type(error).__name__}: {error}. Keep such objects out of "
                    f"what forward reads"
                ) from error

    def changes(self) -> list[tuple[Holder[Any], Any]]:
        """Return the places whose content has changed, with the present content."""
        now = [(holder, holder.read()) for holder in self.holders]
        return [(holder, contents) for holder, contents in now if not holder.same(contents)]

    @contextlib.contextmanager
    def restore_at_end(self) -> Iterator[None]:
        """Restore the present content of every place when the context ends."""
        present = [holder.read() for holder in self.holders]
        try:
            yield
        finally:
            for holder, contents in zip(self.holders, present, strict=True):
                if not holder.same_as(contents, holder.read()):
                    holder.write(contents)

    def restore(self) -> None:
        """Restore the content of every place."""
        for holder, _ in self.changes():
            holder.write(holder.before)

    def values(self) -> Iterator[tuple[str, Any]]:
        """Yield path and value of every object that the places contained."""
        for holder in self.holders:
            yield from holder.parts()

    def _is_foreign(self, module: str | None) -> bool:
        return _is_foreign(module)

    def _visit(self, path: str, value: Any) -> None:
        if isinstance(value, _PLAIN) or id(value) in self._found:
            return
        if not self._code and isinstance(value, (type, types.FunctionType, _MEMO)):
            return
        self._found.add(id(value))
        self._alive.append(value)
        if isinstance(value, (tuple, frozenset)):
            base = built_in(value)
            if base.__len__(value) <= _LONG:
                self._pending.extend((f"{path}[{i}]", item) for i, item in enumerate(base.__iter__(value)))
        elif isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, types.MethodType):
            self._pending += [(path, value.__self__), (path, value.__func__)]
        elif isinstance(value, (staticmethod, classmethod)):
            self._pending.append((path, value.__func__))
        elif isinstance(value, memoryview):
            self._pending.append((path, value.obj))
        elif isinstance(value, property):
            self._pending += [(path, part) for part in (value.fget, value.fset) if part is not None]
        elif isinstance(value, functools.partial):
            self._pending += [(path, value.func), (path, value.args), (path, value.keywords)]
        elif isinstance(value, type):
            if not self._is_foreign(value.__module__):
                self._hold(_Class(f"{value.__qualname__}", value))
                self._pending += [(path, base) for base in value.__bases__]
        elif not isinstance(value, types.ModuleType) and not _is_torchs(value):
            self._visit_object(path, value)

    def _visit_object(self, path: str, value: Any) -> None:
        for kind, holder in _KINDS:
            if isinstance(value, kind):
                if not isinstance(value, np.ndarray) or (value.nbytes < _LARGE and not value.dtype.hasobject):
                    self._hold(holder(path, value))
                break
        if isinstance(value, _MEMO):
            self._hold(_Memo(path, value))
            self._pending.append((path, getattr(value, "__wrapped__", None)))
        elif isinstance(attributes_of(value), dict):
            self._hold(_Attributes(path, value))
        if any(_slots_of(type(value))):
            self._hold(_Slots(path, value))
        self._pending.append((path, type(value)))

    def _visit_function(self, function: types.FunctionType) -> None:
        if self._is_foreign(function.__module__):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            if id(cell) not in self._found:
                self._found.add(id(cell))
                self._hold(_Cell(f"the variable {name} of {function.__qualname__}", cell))
        defaults = (function.__defaults__, function.__kwdefaults__)
        self._pending.append((f"a default of {function.__qualname__}", defaults))
        used, attributes = _names(function.__code__)
        self._use(function.__globals__, used)
        for name in used:
            module = function.__globals__.get(name)
            if isinstance(module, types.ModuleType) and not self._is_foreign(module.__name__):
                self._use(vars(module), attributes)

    def _use(self, values: dict[str, Any], names: Iterable[str]) -> None:
        for name in names:
            if (id(values), name) not in self._used:
                self._used.add((id(values), name))
                self._hold(_Global("", (values, name)))

    def _hold(self, holder: Holder[Any]) -> None:
        self.holders.append(holder)
        self._pending.extend(holder.parts())


_KINDS: tuple[tuple[Any, Callable[[str, Any], Holder[Any]]], ...] = (
    (dict, _Dict),
    ((list, collections.deque), Items),
    (set, _Set),
    ((bytearray, array.array), _Bytes),
    (FOREIGN, _Foreign),
    (np.ndarray, _Array),
)


# Subclasses come before their bases.
_BUILT_IN: tuple[Any, ...] = (
    collections.OrderedDict, collections.defaultdict, dict, list, tuple, collections.deque, set, frozenset,
)  # fmt: skip


def built_in(container: Any) -> Any:
    """Return the built-in class of a container, whose methods read its content.

    The methods of a user's subclass may do anything, such as raise.
    """
    return next(base for base in _BUILT_IN if isinstance(container, base))


def attributes_of(value: Any) -> Any:
    """Return the attributes of an object as they are stored, without the accessors of its class."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def _is(one: Any, other: Any) -> bool:
    return one is other


def _is_torchs(value: Any) -> bool:
    """Return True if ``value`` is torch's own state: a tensor of a trace, its modes, an optimizer."""
    if isinstance(value, torch.Tensor):
        return type(value) not in (torch.Tensor, torch.nn.Parameter)
    kind = type(value).__module__.partition(".")[0]
    holders = (torch.nn.Module, dict, list, *DISTRIBUTIONS)
    return kind in _LIBRARIES - {"numpy"} and not isinstance(value, holders)


def _is_foreign(module: str | None) -> bool:
    """Return True if code of that module contains no state of the user."""
    return module is None or module.partition(".")[0] in _LIBRARIES or is_pythons_module(module)


def names_global(function: types.FunctionType, name: str) -> bool:
    """Return True if ``function`` is not a library's and names a global or builtin ``name``."""
    return not _is_foreign(function.__module__) and name in _names(function.__code__)[0]


def names_attribute(kind: type | None, name: str) -> bool:
    """Return True if a method of a Function's class names an attribute, in code or as a string."""
    return any(name in _names(code)[1] or name in _texts(code) for code in _methods(kind))


def compares_objects(kind: type | None) -> bool:
    """Return True if a method of a Function's class compares objects by identity: ``is``, id()."""
    return any("id" in _names(code)[0] or _compares_variables(code) for code in _methods(kind))


def _methods(kind: type | None) -> Iterator[types.CodeType]:
    """Yield the code of a Function's methods."""
    for name in ("forward", "setup_context", "backward"):
        method = inspect.getattr_static(kind, name, None)
        function = inspect.unwrap(getattr(method, "__func__", method)) if method is not None else None
        if isinstance(function, types.FunctionType):
            yield function.__code__


def _compares_variables(code: types.CodeType) -> bool:
    before = ""
    for instruction in dis.get_instructions(code):
        # None, a class or a dtype is not a local variable.
        if instruction.opname == "IS_OP" and before.startswith(("LOAD_FAST", "LOAD_DEREF")):
            return True
        before = instruction.opname
    return any(_compares_variables(inner) for inner in code.co_consts if isinstance(inner, types.CodeType))


def _texts(code: types.CodeType) -> set[str]:
    """Return the strings among the constants of ``code``, and of the code nested in it."""
    inner = [_texts(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return {constant for constant in code.co_consts if isinstance(constant, str)}.union(*inner)


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the globals that ``code`` reads or writes, and the attributes."""
    found: tuple[dict[str, None], dict[str, None]] = {}, {}
    for instruction in dis.get_instructions(code):
        if instruction.opname.endswith(("_GLOBAL", "_NAME")):
            found[0][instruction.argval] = None
        elif "_ATTR" in instruction.opname or "_METHOD" in instruction.opname:
            found[1][instruction.argval] = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for names, more in zip(found, _names(constant), strict=True):
                names.update(dict.fromkeys(more))
    return tuple(found[0]), tuple(found[1])


def _slots_of(kind: type) -> tuple[str, ...]:
    """Return the attributes of a user's class that are stored in slots."""
    if _is_foreign(kind.__module__):
        return ()
    declared = {name for base in kind.__mro__ if "__slots__" in vars(base) for name in vars(base)}
    # A property of a subclass may hide a slot.
    members = types.MemberDescriptorType
    return tuple(name for name in declared if isinstance(inspect.getattr_static(kind, name), members))
