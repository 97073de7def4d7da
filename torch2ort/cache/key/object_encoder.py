"""Everything that is no plain value, function or class: containers, tensors, modules, other objects."""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import ctypes
import decimal
import functools
import hashlib
import inspect
import logging
import re
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Collection, Iterable
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from torch2ort._torch import global_state as private
from torch2ort.cache.key.constant_bytes import atom, form, words
from torch2ort.cache.key.fully_read_types import is_read_whole
from torch2ort.cache.key.functions_and_classes import Definitions
from torch2ort.cache.key.global_names import check_pure
from torch2ort.cache.key.guards import PLAIN
from torch2ort.cache.key.key_builder import Unkeyable, Walk
from torch2ort.cache.key.library_operators import write_operator
from torch2ort.cache.key.packages import package_of_module
from torch2ort.cache.key.write_only_state import NOTHING, Unread
from torch2ort.pythonop.abstract_run.object_snapshot import built_in
from torch2ort.pythonop.abstract_run.opaque_objects import FOREIGN, last_results, steps_unseen

# Bytes from which on a tensor is told by its identity and version, within a process.
_LARGE = 1 << 20
_Pair = collections.namedtuple("_Pair", "first second")
Write = Callable[[Any], None]
# Where a context manager keeps what it runs.
_GENERATOR = words("gen")

# Attributes of a module that its forward never sees.
_MODULE_SKIPPED = words(
    """training _non_persistent_buffers_set _state_dict_hooks _state_dict_pre_hooks _load_state_dict_pre_hooks
    _load_state_dict_post_hooks"""
)
# Keyed by numbers that count all hooks of the process.
_HOOKS = words(
    """_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks _forward_hooks_with_kwargs
    _forward_hooks_always_called _forward_pre_hooks_with_kwargs"""
)
# hash() of the object itself, in transformers' GenerationConfig: another number in each process.
_HASHES = words("_original_object_hash")
_WEIGHTS = words("_buffers _parameters")
# The tables of hooks that a call looks into; the others say more of the same hooks.
_CALLED = words("_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks")
_TABLES = _HOOKS | _WEIGHTS | words("_modules")
# Lists of a recurrent layer's parameters, which it makes again whenever one of them is set.
_FLAT = words("_flat_weights _flat_weight_refs")
_OF_MODULES = _MODULE_SKIPPED | _TABLES | _FLAT
# The mode counts, whoever reads it.
_UNREAD = (_MODULE_SKIPPED | _FLAT) - {"training"}


class Values:
    """Writes any value that a model's code can reach.

    Args:
        walk: where to.
        unhooked: ids of the modules whose own hooks run outside of the graph.
        unread: places that do not count.
    """

    def __init__(self, walk: Walk, unhooked: Collection[int] = (), unread: Unread = NOTHING) -> None:
        self._walk = walk
        self._unread = unread
        self._unhooked = unhooked
        # Tensors among the attributes of modules: a graph takes them as inputs, whatever their values.
        self._fed: set[int] = set()
        self.definitions = Definitions(walk, self.write)
        self._writers = self._exact_types()
        self._are_arguments = False

    def write(self, value: Any) -> None:
        """Write a value, or a reference to it.

        Raises:
            Unkeyable: it holds something that cannot be compared between processes.
        """
        data = atom(value)
        if data is not None:
            self._walk.write(data)
            return
        kind = type(value)
        if kind is tuple:
            # Its items are what it is: a guard on it would add nothing to that on the place that holds it.
            self._walk.write(b"(%d" % len(value))
            for item in value:
                self.write(item)
        elif kind is set or kind is frozenset:
            self._set(value)
        elif id(value) in self._walk.weights:
            self._weight(value)
            # Tracing does not know it in this place, and makes a constant of it.
            if not (self._are_arguments or self._walk.seen(value)):
                self._tensor(value)
        elif not self._walk.seen(value):
            self._walk.write(b"<")
            self._writer_of(value)(value)
            self._walk.write(b">")

    def write_arguments(self, arguments: Any) -> None:
        """Write the arguments of a call, in which tensors are inputs of the graph."""
        self._are_arguments = True
        try:
            self.write(arguments)
        finally:
            self._are_arguments = False

    def _weight(self, tensor: torch.Tensor) -> None:
        self._walk.write(form(b"w", self._walk.weights[id(tensor)].encode()))

    def _writer_of(self, value: Any) -> Write:
        writer = self._writers.get(type(value))
        if writer is not None:
            return writer
        choices: tuple[tuple[Any, Write], ...] = (
            (type, functools.partial(self.definitions.class_, used_as_value=True)),
            (torch.Tensor, self._tensor),
            (torch.nn.Module, self.module),
            (ModuleType, self.definitions.module),
            ((dict, list, tuple, set, frozenset, str, int, float, bytes), self._subclass_of_container),
            (PurePath, lambda v: self._walk.atom(str(v))),
            (np.ndarray, self._subclass_of_array),
            (FOREIGN, self._foreign),
        )
        return next((writer for kinds, writer in choices if isinstance(value, kinds)), self._object)

    def _exact_types(self) -> dict[type, Write]:
        walk, function = self._walk, self.definitions.function
        named: list[Any] = [
            types.MethodDescriptorType,
            types.WrapperDescriptorType,
            types.ClassMethodDescriptorType,
        ]
        named += [types.GetSetDescriptorType, types.MemberDescriptorType]
        shown: list[Any] = [types.GenericAlias, types.UnionType, typing.TypeVar, typing.ParamSpec]
        shown += [
            kind for kind in vars(typing).values() if isinstance(kind, type) and kind.__name__.startswith("_")
        ]
        opaque: list[Any] = [object, type(threading.Lock()), type(threading.RLock())]
        writers: dict[type, Write] = {
            list: self._items,
            collections.deque: self._items,
            dict: self._mapping,
            types.MappingProxyType: self._mapping,
            **dict.fromkeys(map(type, ({}.keys(), {}.values(), {}.items())), lambda v: self.write(v.mapping)),
            contextvars.ContextVar: self._context_variable,
            bytearray: self._bytes,
            memoryview: self._bytes,
            array.array: self._bytes,
            FunctionType: function,
            BuiltinFunctionType: self._builtin,
            MethodType: lambda v: self._all(v.__self__, v.__func__),
            types.MethodWrapperType: lambda v: self._all(v.__self__, v.__name__),
            functools.partial: lambda v: self._all(v.func, v.args, v.keywords),
            functools.partialmethod: lambda v: self._all(v.func, v.args, v.keywords),
            type(contextlib.contextmanager(lambda: iter(()))()): self._context_manager,
            functools.cached_property: lambda v: self._all(v.func, v.attrname),
            property: lambda v: self._all(v.fget, v.fset, v.fdel),
            staticmethod: lambda v: self.write(v.__func__),
            classmethod: lambda v: self.write(v.__func__),
            weakref.ref: lambda v: self.write(v()),
            re.Pattern: lambda v: self._all(v.pattern, v.flags),
            logging.Logger: lambda v: walk.atom(v.name),
            type(functools.lru_cache(lambda: None)): lambda v: self._all(v.__wrapped__, v.cache_parameters()),
            np.ndarray: self._array,
            np.ufunc: lambda v: walk.atom(v.__name__),
            type(np.sum): lambda v: walk.atom(f"{v.__module__}.{v.__qualname__}"),
            # What a named tuple's class has for each of its fields.
            type(vars(_Pair)["first"]): lambda v: walk.atom(v.__reduce__()[1]),
            **dict.fromkeys(private.OPERATOR_TYPES, self._operator),
        }
        writers.update(
            dict.fromkeys(named, lambda v: walk.atom(f"{v.__objclass__.__qualname__}.{v.__name__}"))
        )
        writers.update(dict.fromkeys(shown, lambda v: walk.atom(repr(v))))
        writers.update(dict.fromkeys(opaque, lambda v: walk.atom(type(v).__name__)))
        return writers

    # --- containers

    def _all(self, *values: Any) -> None:
        for value in values:
            self.write(value)

    def _items(self, values: Any) -> None:
        if id(values) in self._unread.containers:
            return
        if isinstance(values, list):
            self._walk.guards.sequence(values, self._walk.place)
        else:
            self._guard_ids(values)
        self._walk.atom((type(values).__name__, getattr(values, "maxlen", None)))
        self._all(*values)

    def _mapping(self, mapping: Any) -> None:
        if id(mapping) in self._unread.containers:
            return
        skipped = self._unread.of(mapping)
        if isinstance(mapping, dict):
            self._walk.guards.items(mapping, self._walk.place, skipped=skipped)
        else:
            self._walk.guards.value(
                lambda: [(id(k), id(v)) for k, v in mapping.items()], mapping, self._walk.place
            )
        for key, value in mapping.items():
            if not (skipped and key in skipped):
                self._all(key, value)

    def _guard_ids(self, values: Iterable[Any]) -> None:
        self._guard_value(lambda: [id(value) for value in values], values)

    def _guard_value(self, read: Callable[[], Any], value: Any) -> None:
        self._walk.guards.value(read, value, self._walk.place)

    def _bytes(self, value: Any) -> None:
        memory = memoryview(value)
        self._walk.atom((memory.format, bytes(memory)))
        self._guard_value(lambda: bytes(memoryview(value)), value)

    def _set(self, values: Any) -> None:
        base = built_in(values)
        if base is set:
            self._guard_value(lambda: [id(value) for value in set.__iter__(values)], values)
        members = list(base.__iter__(values))
        try:
            tokens = {_token(value): value for value in members}
        except Unkeyable as reason:
            self._walk.refuse(str(reason), values)
            self._all(*members)
            return
        if len(tokens) < len(members):
            self._walk.refuse(
                "a set holds several things of one name, in another order in each process", values
            )
        self._walk.write(b"{%d" % len(members))
        self._all(*(tokens[token] for token in sorted(tokens)))

    def _subclass_of_container(self, value: Any) -> None:
        self.definitions.class_(type(value))
        # By the base's own methods: a class may make itself look otherwise.
        place, guards = self._walk.place, self._walk.guards
        guards.type_of(value, place)
        if isinstance(value, collections.OrderedDict):
            guards.value(lambda: [id(key) for key in collections.OrderedDict.keys(value)], value, place)
            guards.items(value, place)
            self._all(*collections.OrderedDict.items(value))
        elif isinstance(value, dict):
            skipped = self._unread.of(value)
            if id(value) not in self._unread.containers:
                guards.items(value, place, skipped=skipped)
                self._all(*(item for item in dict.items(value) if item[0] not in skipped))
        elif isinstance(value, list):
            guards.sequence(value, place)
            self._all(*list.__iter__(value))
        elif isinstance(value, tuple):
            self._all(*tuple.__iter__(value))
        elif isinstance(value, (set, frozenset)):
            self._set(value)
        else:
            self._walk.write(_plain_part(value))
        if isinstance(value, collections.defaultdict):
            self.write(value.default_factory)
        self._attributes(value)

    # --- objects

    def _object(self, value: Any) -> None:
        kind = type(value)
        if kind.__module__ in ("datetime", "decimal", "fractions", "uuid", "ipaddress"):
            if isinstance(value, decimal.Context):
                self._guard_value(lambda: repr(value), value)
            self._walk.atom(repr(value))
            return
        if isinstance(value, np.generic):
            self._walk.atom("scalar")
            self._array(np.asarray(value))
            return
        if isinstance(value, np.dtype):
            self._walk.atom(repr(value))
            return
        if steps_unseen(value):
            self._walk.refuse_unseen(
                f"a {kind.__qualname__} steps on without showing where it is. Keep the values in a list, or "
                f"pass them as arguments",
                value,
            )
            return
        if _hides_state(kind):
            self._walk.refuse(
                f"a {kind.__module__}.{kind.__qualname__} keeps what it is outside of Python, where it "
                f"cannot be compared between processes",
                value,
            )
        package = package_of_module(kind.__module__)
        if package is not None:
            self._walk.check(check_pure, package, kind)
        self._walk.guards.type_of(value, self._walk.place)
        self.definitions.class_(kind)
        self._attributes(value)

    def _context_manager(self, value: Any) -> None:
        """What a function of ``contextlib.contextmanager`` gives: its call, and whether that has begun."""
        if not isinstance(value.gen, types.GeneratorType):
            self._object(value)
            return
        self._guard_value(lambda: inspect.getgeneratorstate(value.gen), value)
        self._walk.atom(inspect.getgeneratorstate(value.gen))
        call = vars(value)
        self._walk.guards.attributes(call, self._walk.place, skipped=_GENERATOR, always=True)
        # The block that it is for takes them away.
        if "func" in call:
            self._all(call["func"], call["args"], call["kwds"])

    def _attributes(self, value: Any) -> None:
        kind: type = type(value)
        whole = is_read_whole(kind)
        own = getattr(value, "__dict__", None)
        own, skipped, place = {} if own is None else own, _HASHES, f"a {kind.__name__}"
        if isinstance(own, dict):
            skipped = skipped | self._unread.of(own) | _uncounted(kind, own)
            self._walk.guards.attributes(own, place, skipped=skipped)
        for name in sorted(own, key=str):
            if name not in skipped:
                if whole and isinstance(own, dict):
                    self._walk.guards.entry(own, name, f"the attribute {name!r} of {place}")
                self._attribute(str(name), own[name], counts=whole)
        for cls in kind.__mro__:
            for name, member in vars(cls).items():
                if isinstance(member, types.MemberDescriptorType):
                    self._walk.guards.attribute(value, name, self._walk.place)
                    with contextlib.suppress(AttributeError):  # a slot that was never assigned
                        content = member.__get__(value)
                        self._attribute(name, content, counts=whole)

    def _attribute(self, name: str, value: Any, *, counts: bool = False) -> None:
        """Write an attribute.

        Args:
            name: of it.
            value: of it.
            counts: whether code that is not looked through may read it, else reached code must have its name.
        """
        if counts:
            self._walk.atom(name)
            self.write(value)
            return
        data = atom(value)
        if data is None:
            self._walk.attribute(name, functools.partial(self.write, value))
        else:  # which can always be written
            self._walk.atom(name)
            self._walk.write(data)
            self._walk.note(name, value)

    def _builtin(self, value: Any) -> None:
        owner, module = value.__self__, value.__module__
        if isinstance(owner, ModuleType):
            module = owner.__name__
        elif not isinstance(module, str):
            self._all(owner, value.__name__)  # a method that is bound to an object
            return
        package = package_of_module(module)
        if package is not None:
            self.definitions.package(package, module)
            self._walk.check(check_pure, package, value)
        else:
            self._walk.refer(f"extension {module}", ("extension", module), lambda: _file_digest(module))
        self._walk.atom(f"{module}.{value.__qualname__}")

    def _operator(self, value: Any) -> None:
        write_operator(self._walk, value, self.write)

    def _array(self, value: np.ndarray[Any, Any]) -> None:
        if value.dtype.hasobject:
            self._walk.refuse("a NumPy array of Python objects cannot be compared between processes", value)
            return
        if value.nbytes > _LARGE and self._walk.in_process:
            self._walk.atom((value.dtype.str, value.shape, value.strides))
            if value.flags.writeable:
                self._walk.refuse_unseen(
                    f"a NumPy array of {value.nbytes} bytes would have to be compared before each call. Make "
                    f"it a buffer with torch.from_numpy(array), or set array.flags.writeable = False",
                    value,
                )
            else:
                self._walk.guards.pin(value)
                self._guard_value(lambda: value.flags.writeable, value)
            return
        self._guard_value(lambda: (value.dtype.str, value.shape, value.tobytes()), value)
        digest = hashlib.sha256(value.tobytes()).hexdigest()
        self._walk.atom((value.dtype.str, value.shape, value.strides, digest))

    def _subclass_of_array(self, value: np.ndarray[Any, Any]) -> None:
        self._walk.guards.type_of(value, self._walk.place)
        self.definitions.class_(type(value))
        self._array(value)
        self._attributes(value)

    def _foreign(self, value: Any) -> None:
        """Memory as C has it, also such as other processes write to."""
        self.definitions.class_(type(value))
        self._bytes(value)

    def _context_variable(self, variable: contextvars.ContextVar[Any]) -> None:
        nothing = object()
        self._guard_value(lambda: id(variable.get(nothing)), variable)
        self._walk.atom(variable.name)
        content = variable.get(nothing)
        self._walk.guards.pin(content)
        if content is not nothing:
            self.write(content)

    # --- tensors and modules

    def _tensor(self, value: torch.Tensor) -> None:
        if type(value) is not torch.Tensor:
            self.definitions.class_(type(value))
        if value.layout is not torch.strided or value.device.type == "meta" or value.is_quantized:
            self._walk.refuse(
                f"a tensor on {value.device} of layout {value.layout} has no values that can be compared",
                value,
            )
            return
        fed = id(value) in self._fed
        if not fed:
            self._guard_value(lambda: _form(value), value)
        if self._walk.in_process and (fed or value.nbytes > _LARGE):
            self._walk.atom(describe(value))
            if not fed:
                self._walk.atom(private.version_of(value))
                self._walk.guards.pin(value)
            self._attributes(value)
            return
        plain = value.detach().cpu().contiguous()
        self._walk.atom(describe(value))
        # Not by numpy: PyTorch lets nobody free the memory of a tensor that was once an array, as FSDP does.
        content = (ctypes.c_ubyte * plain.nbytes).from_address(plain.data_ptr())
        self._walk.atom(hashlib.sha256(content).hexdigest())
        self._attributes(value)

    def module(self, module: torch.nn.Module) -> None:
        """Write a reference to a ``torch.nn.Module``."""
        if isinstance(module, torch.jit.ScriptModule):
            self._walk.refuse(
                f"a {type(module).__qualname__} keeps its code outside of Python, where it cannot be "
                f"compared between processes",
                module,
            )
            return
        path = self._walk.modules.get(id(module))
        label = f"module {path or '(the model)'}" if path is not None else "module outside of the model"
        self._walk.refer(label, id(module), lambda: self._module(module))

    def _module(self, module: torch.nn.Module) -> None:
        self.definitions.class_(type(module))
        attributes = module.__dict__
        self._guard_module(module)
        unread = self._unread.of(attributes)
        for name in sorted(attributes):
            value = attributes[name]
            if name in unread:
                continue
            if name not in _OF_MODULES:
                self._attribute(name, value)
            elif name not in _MODULE_SKIPPED and (value or name not in _TABLES):
                self._table(module, name, value)

    def _guard_module(self, module: torch.nn.Module) -> None:
        guards, place, attributes = self._walk.guards, self._walk.place, module.__dict__
        guards.type_of(module, f"the class of {place}")
        skipped = _UNREAD | self._unread.of(attributes)
        guards.attributes(attributes, self._called(module), skipped=skipped)
        if id(module) in self._walk.modules:
            self._fed.update(id(v) for v in attributes.values() if isinstance(v, torch.Tensor))
        else:
            self._walk.atom(module.training)  # the modes of the model's own have a component
        # A graph is fed with the model's own; the values of others are its constants.
        guard = guards.tensors if id(module) in self._walk.modules else guards.items
        for name in sorted(_WEIGHTS):
            guard(attributes[name], f"{name} of {place}")
        for name in ("_modules", *(() if id(module) in self._unhooked else sorted(_CALLED))):
            guards.items(attributes[name], f"{name} of {place}")

    def _called(self, module: torch.nn.Module) -> str:
        """What people call a module."""
        path, kind = self._walk.modules.get(id(module)), type(module).__name__
        if path is None:
            return f"a {kind} outside of the model"
        return f"the {kind} '{path}'" if path else f"the {kind}"

    def _table(self, module: torch.nn.Module, name: str, value: Any) -> None:
        """Write what a module keeps its hooks, weights or submodules in."""
        if name in _HOOKS:
            value = list(value.values())
        elif name in _TABLES:
            value = list(value.items())
        of_weights = name in _WEIGHTS or (name in _FLAT and isinstance(module, torch.nn.RNNBase))
        write = functools.partial(self._table_of_weights if of_weights else self.write, value)
        if self._walk.in_process and name in _TABLES:
            # Torch's own code reads these, which nobody walks.
            self._walk.atom(name)
            write()
        else:
            self._walk.attribute(name, write)

    def _table_of_weights(self, items: Iterable[Any]) -> None:
        """Where tracing finds parameters and buffers: a module's own tables."""
        for item in items:
            for part in item if type(item) is tuple else (item,):
                value = part() if isinstance(part, weakref.ref) else part
                if isinstance(value, torch.Tensor) and id(value) in self._walk.weights:
                    self._weight(value)
                else:
                    self.write(part)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What tells that a tensor whose values went into the graph is another one, or was written to."""
    return private.version_of(tensor), tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.requires_grad


def describe(tensor: torch.Tensor) -> str:
    """All that a graph depends on of a tensor but its values."""
    kind = "Tensor" if type(tensor) in PLAIN else type(tensor).__name__
    return (
        f"{kind} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} "
        f"strides {list(tensor.stride())} on {tensor.device} requires_grad={tensor.requires_grad}"
    )


def _token(value: Any) -> bytes:
    """What orders the members of a set, the same in each process."""
    data = atom(value)
    if data is not None:
        return data
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}".encode()
    raise Unkeyable(f"a set of {type(value).__qualname__} objects has another order in each process")


def _plain_part(value: Any) -> bytes:
    exact: dict[type, Callable[[Any], Any]] = {
        str: str.__str__, int: int.__int__, float: float.__float__, bytes: lambda v: bytes(memoryview(v))
    }  # fmt: skip
    data = next(atom(convert(value)) for base, convert in exact.items() if isinstance(value, base))
    assert data is not None
    return data


def _hides_state(kind: type) -> bool:
    """Whether an instance holds more than its attributes and slots: its memory is larger than those need."""
    slots = sum(
        isinstance(member, types.MemberDescriptorType)
        for cls in kind.__mro__
        for member in vars(cls).values()
    )
    words = slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    pointer = object.__basicsize__ // 2
    return kind.__basicsize__ > object.__basicsize__ + words * pointer


def _file_digest(module: str) -> str:
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        raise Unkeyable(f"the module {module} has no file that could be compared between processes")
    with open(file, "rb") as stream:
        return hashlib.sha256(stream.read()).hexdigest()


def _uncounted(kind: type, attributes: Collection[str]) -> frozenset[str]:
    """The attributes that count in no key: a transform's last result, and what classes of torch2ort's say."""
    package = package_of_module(kind.__module__)
    own = package is not None and package.name == "torch2ort"
    counted = getattr(kind, "counted_in_keys", None) if own else None
    return last_results(kind) if counted is None else frozenset(attributes) - counted
