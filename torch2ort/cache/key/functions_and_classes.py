"""Functions and classes as components of a key: their content and the objects that they use."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch

from torch2ort._torch import global_state as private
from torch2ort.cache.key.bytecode_names import code_bytes, uses_of
from torch2ort.cache.key.constant_bytes import atom
from torch2ort.cache.key.global_names import (
    MISSING,
    check_pure,
    check_pure_module,
    holds,
    is_operator_namespace,
    public_items,
    resolve,
    topic_of,
)
from torch2ort.cache.key.guards import SKIPPED
from torch2ort.cache.key.key_builder import CONSTRUCTORS, ComponentOwner, Unkeyable, Walk, constructor_of
from torch2ort.cache.key.library_operators import check_namespace
from torch2ort.cache.key.package_code import OPAQUE, Installed, functions_in
from torch2ort.cache.key.packages import Package, package_of_function, package_of_import, package_of_module
from torch2ort.pythonop.registry.inline import inlined

# Functions that run text, whose names no compiled code contains.
_RUN_TEXT = (eval, exec)
_OF_AUTOGRAD = frozenset({"forward", "setup_context", "backward", "vjp", "jvp", "vmap"})
_NEVER_CALLED = frozenset(
    {"__hash__", "__del__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__dir__"}
)


class Definitions:
    """Encoder of functions, classes and modules.

    Args:
        walk: the walk that receives the components.
        write_value: writes any other value.
    """

    def __init__(self, walk: Walk, write_value: Callable[[Any], None]) -> None:
        self._walk = walk
        self._value = write_value
        self.installed = Installed(walk, self, write_value)

    # --- functions

    def function(self, function: FunctionType, via: str | None = None, attribute: str | None = None) -> None:
        """Write a reference to a Python function.

        Args:
            function: the function.
            via: name that must be read for the function to count; ``None``: it always counts.
            attribute: name of the Function's attribute under which other code calls it.
        """
        package = package_of_function(function)
        name = f"{function.__module__}.{function.__qualname__}"
        if package is None:
            fill = functools.partial(self._own_function, function)
            self._walk.refer(f"code {name}", id(function), fill, via=via, attribute=attribute)
            return
        self.package(package, function.__module__)
        self._walk.atom(name)
        self._walk.check(check_pure, package, function)
        if function.__closure__ or function.__dict__:
            # The function is a decorator's wrapper, and the wrapped function may be the user's.
            self._walk.refer(f"wrapper {name}", id(function), lambda: self._state_of(function), via=via)
        self.installed.follow(package, function, via)

    def _own_function(self, function: FunctionType) -> None:
        walk, code = self._walk, function.__code__
        walk.guards.attribute(function, "__code__", walk.place)
        walk.write(code_bytes(code))
        self._state_of(function)
        for reader in ("__annotations__", "get_type_hints"):
            walk.refer(
                f"annotations of {function.__module__}.{function.__qualname__}",
                ("annotations", id(function)),
                lambda: self._value(dict(function.__annotations__)),
                via=reader,
            )
        uses = uses_of(code)
        walk.reads(uses.names, any_name=uses.any_name)
        for chain in uses.chains:
            self._global(chain, function)
        for name, taken in uses.imports.items():
            self._import(name, taken, function)

    def _state_of(self, function: FunctionType) -> None:
        """Write the defaults, closure and attributes of a function."""
        guards, place = self._walk.guards, self._walk.place
        for name in ("__defaults__", "__kwdefaults__"):
            guards.attribute(function, name, f"{name} of {place}")
        if function.__dict__:
            guards.attributes(function.__dict__, place, skipped=private.ADDRESSES, always=True)
            guards.attribute(function, "__dict__", f"the attributes of {place}")
        self._value(function.__defaults__)
        self._value(function.__kwdefaults__)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            self._walk.atom(name)
            guards.attribute(cell, "cell_contents", f"the variable {name} of {place}")
            try:
                content = cell.cell_contents
            except ValueError:
                continue  # not assigned yet
            if name == "__class__" and isinstance(content, type):
                self.class_(content)  # super() does not construct it
            else:
                self._value(content)
        for name, value in function.__dict__.items():
            if name in private.ADDRESSES:
                continue
            self._walk.attribute(name, functools.partial(self._value, value))

    def _global(self, chain: tuple[str, ...], function: FunctionType) -> None:
        try:
            value, used = resolve(chain, function.__globals__, self._walk.guards)
        except Unkeyable as reason:
            self._walk.refuse(str(reason))
            return
        name = ".".join((str(function.__globals__.get("__name__")), *chain[:used]))
        self._walk.atom(chain[:used])
        if value is MISSING:
            return
        if value is type:
            self._walk.asks_types = True
        if any(value is runs for runs in _RUN_TEXT):
            self._walk.refuse_unseen(
                f"it calls {chain[0]}(), and what the text reads is not seen. Call a function instead", value
            )
        if isinstance(value, ModuleType):
            if used == len(chain):
                self.module(value)
            elif package_of_module(value.__name__) is None:
                self.whole_module(value)  # its __getattr__ decides
        elif isinstance(value, (FunctionType, BuiltinFunctionType, type)):
            self._value(value)
        else:
            self._walk.refer(f"global {name}", ("global", id(value), name), lambda: self._content(value))

    def _content(self, value: Any) -> str | None:
        if atom(value) is not None and len(text := f"{type(value).__name__} {value!r}") < 100:
            return text
        self._value(value)
        return None

    def _import(self, name: str, taken: Sequence[str], function: FunctionType) -> None:
        full = importlib.util.resolve_name(name, function.__globals__.get("__package__"))
        self._walk.atom(full)
        package = package_of_import(full)
        module = sys.modules.get(full)
        if package is not None:
            self._package_module(package, full)
        elif module is not None and all(holds(module, part) for part in taken):
            self.module(module)
        else:
            self._walk.is_partial = True
            self._walk.refuse(
                f"it imports {name}, which cannot be read before it runs; import it at the top of the file"
            )

    # --- modules

    def module(self, module: ModuleType) -> None:
        """Write a module that is used as a value: any code may read anything in it."""
        package = package_of_module(module.__name__)
        self._walk.atom(module.__name__)
        if is_operator_namespace(module):
            if module is not torch.ops:
                self._walk.check(check_namespace, module.__name__.rpartition(".")[2])
            return
        if package is None:
            self.whole_module(module)
        else:
            self._package_module(package, module.__name__)

    def _package_module(self, package: Package, name: str) -> None:
        self.package(package, name)
        self._walk.check(check_pure_module, package, name)

    def whole_module(self, module: ModuleType) -> None:
        """Refer to everything that a module of the user defines."""

        def fill() -> None:
            self._walk.guards.attributes(vars(module), self._walk.place)
            for name, value in public_items(module):
                self._walk.attribute(name, functools.partial(self._value, value))

        self._walk.refer(f"python module {module.__name__}", id(module), fill)

    def package(self, package: Package, module: str | None) -> None:
        """Refer to the version of an installed package, a module of which is used."""
        topic = topic_of(module or "")
        if topic is not None:
            self._walk.topics.add(topic)
        self._walk.refer(f"package {package.name}", package, lambda: package.version)

    # --- classes

    def class_(self, cls: type, *, used_as_value: bool = False) -> None:
        """Write a reference to a class.

        Args:
            cls: the class.
            used_as_value: True if code may call the class, so that its constructor counts.
        """
        package = self._walk.package_of(cls)
        self.note_function(cls)
        if used_as_value and cls is torch.nn.Parameter:
            self._walk.asks_parameters = True
        name = f"{cls.__module__}.{cls.__qualname__}"
        if package is not None:
            self.package(package, cls.__module__)
            self._walk.atom(name)
            if used_as_value:
                self._walk.calls(cls)
                self._walk.check(check_pure, package, cls)
            self.installed.inspect_class(cls)
            return
        is_function = issubclass(cls, torch.autograd.Function)
        kind = "Function" if is_function else "class"
        is_opaque = is_function and not self._walk.inlines_functions and inlined.find(name, cls) is None
        owner = ComponentOwner.FUNCTION if is_opaque else ComponentOwner.MODEL
        self._walk.refer(f"{kind} {name}", id(cls), lambda: self._own_class(cls), owner=owner)
        if used_as_value:
            self._walk.calls(cls)

    def inspect_package_class(self, cls: type) -> None:
        """Look for attributes that were set on a class of a package while the process ran."""
        self.installed.inspect_class(cls)

    def note_function(self, cls: type) -> None:
        """Record a class under its name if it is a Function."""
        base = torch.autograd.Function
        if cls is not base and issubclass(cls, base) and self._walk.once(("Function", cls)):
            self._walk.functions[f"{cls.__module__}.{cls.__qualname__}"].append(cls)

    def _own_class(self, cls: type) -> None:
        # No code reads the names of a Function's methods: autograd calls the methods.
        self._walk.guards.class_items(cls, self._walk.place, always=issubclass(cls, torch.autograd.Function))
        self._walk.guards.attribute(cls, "__bases__", f"bases of {self._walk.place}")
        self.class_(type(cls))
        for base in cls.__bases__:
            self.class_(base)
        doc = f"docstring of {cls.__module__}.{cls.__qualname__}"
        self._walk.refer(doc, ("docstring", id(cls)), lambda: self._value(cls.__doc__), via="__doc__")
        for name, item in list(vars(cls).items()):
            if name in SKIPPED:
                continue
            functions = list(functions_in(item))
            if functions:
                self._walk.atom(name)
                self._walk.atom(type(item).__name__)
                for function in functions:
                    self.function(function, self._reached_by(cls, name), _helper(cls, name))
            else:
                self._walk.attribute(name, functools.partial(self._value, item))
        if any(map(self._calls_by_name, cls.__mro__)):
            self._code_of_methods(cls)

    def _calls_by_name(self, cls: type) -> bool:
        """Return True if a class's own code may call a method by a name that it computes at run time."""
        package = self._walk.package_of(cls)
        return package is not None and package.name != "torch" and package.name not in OPAQUE

    def _code_of_methods(self, cls: type) -> None:
        """Write the code of every method, also of those whose names no inspected code reads."""
        for base in cls.__mro__:
            if self._walk.package_of(base) is None:
                for item in list(vars(base).values()):
                    for function in functions_in(item):
                        self._walk.write(code_bytes(function.__code__))

    def _reached_by(self, cls: type, name: str) -> str | None:
        """Return the name that must be read for a method to count; ``None`` if Python or torch calls it."""
        if issubclass(cls, torch.autograd.Function):
            return None
        if name in CONSTRUCTORS:
            return constructor_of(cls)
        if name.startswith("__") and name.endswith("__") and name not in _NEVER_CALLED:
            return None
        return name


def _helper(cls: type, name: str) -> str | None:
    """Return the name of a Function's method if other code than autograd may call it."""
    return name if issubclass(cls, torch.autograd.Function) and name not in _OF_AUTOGRAD else None
