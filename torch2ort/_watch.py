"""What a graph depends on in its module besides the call: modes and settings, hooks, parameters, buffers."""

from __future__ import annotations

import enum
import operator
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch


class Watch:
    """The modules and tensors below ``model``, found once and compared cheaply in every step.

    Attributes:
        names: name of each tensor; a tied one has several.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._find()

    def _find(self) -> None:
        self._modules = [self._model]
        self._children: list[tuple[dict[str, Any], str]] = []
        tensors: dict[str, tuple[dict[str, Any], str]] = {}
        found = {id(self._model)}
        for prefix, module in self._model.named_modules(remove_duplicate=False):
            dot = f"{prefix}." if prefix else ""
            for held in (module._parameters, module._buffers):
                tensors.update(
                    {dot + name: (held, name) for name, value in held.items() if value is not None}
                )
            if id(module) not in found:
                found.add(id(module))
                self._modules.append(module)
        for module in self._modules:
            self._children += [(module._modules, name) for name in module._modules]
        self._child_modules = [children[name] for children, name in self._children]
        self._holders = [
            holder
            for module in self._modules
            for holder in (module._modules, module._parameters, module._buffers)
        ]
        self._settings = [(module.__dict__, _reader(module)) for module in self._modules]
        self._values = self._read()
        # The model's own are called around the graph, not in it.
        self._hooks = [hooks for module in self._modules[1:] for hooks in _hooks_of(module)]
        self._count = sum(map(len, self._holders))
        self._tensors = list(tensors.values())
        self.names = tuple(tensors)

    def tensors(self) -> list[torch.Tensor]:
        """The tensor behind each of :attr:`names` as it is now, also where one was replaced."""
        try:
            if (
                sum(map(len, self._holders)) == self._count
                and [children[name] for children, name in self._children] == self._child_modules
            ):
                tensors = [holder[name] for holder, name in self._tensors]
                if not any(tensor is None for tensor in tensors):
                    return tensors
        except KeyError:
            pass
        # A module or tensor was added, removed or replaced.
        self._find()
        return [holder[name] for holder, name in self._tensors]

    def changed(self, before: tuple[Any, ...]) -> str:
        """Names an attribute that differs from ``before``, a former first entry of :meth:`state`."""
        for module, old, new in zip(self._modules, before, self._values, strict=False):
            if old != new:
                names = _settings_of(module)
                values = zip(names, old[1][1:], new[1][1:], strict=False)
                name = next((n for n, was, now in values if was is not now), "?")
                return f"'{name}' of a {type(module).__name__}"
        return "the modules"

    def _read(self) -> tuple[Any, ...]:
        return tuple([(len(held), read(held)) for held, read in self._settings])

    def state(self, tensors: list[torch.Tensor]) -> tuple[Any, ...]:
        """What a graph depends on in modules (mode, settings, hooks) and in tensors (name, dtype, ...)."""
        try:
            same = self._read() == self._values
        except KeyError:
            same = False
        if not same:
            # An attribute may be gone, or no setting any more.
            self._find()
        return (
            self._values,
            tuple([tuple(hooks) for hooks in self._hooks if hooks]),
            self.names,
            tuple([tensor.dtype for tensor in tensors]),
            tuple([tensor.shape for tensor in tensors]),
            tuple([tensor.requires_grad for tensor in tensors]),
        )


# Attributes of these types are settings that forward may read, and can be compared in no time.
_SETTING_TYPES = (
    bool, bytes, complex, enum.Enum, float, int, str, torch.device, torch.dtype, type, type(None),
    types.BuiltinFunctionType, types.FunctionType,
)  # fmt: skip
# What most attributes of a module are: its tables of hooks, tensors and submodules.
_TABLE_TYPES = frozenset({dict, OrderedDict})


def _settings_of(module: torch.nn.Module) -> list[str]:
    """Names of the plain attributes of ``module``, its mode among them."""
    return [
        name
        for name, value in module.__dict__.items()
        if type(value) not in _TABLE_TYPES and isinstance(value, _SETTING_TYPES)
    ]


def _reader(module: torch.nn.Module) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Reads the plain attributes of ``module`` out of its dictionary."""
    # `training` twice: of a single name there would come no tuple.
    return operator.itemgetter("training", *_settings_of(module))


def _hooks_of(module: torch.nn.Module) -> tuple[dict[int, Any], ...]:
    return (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
