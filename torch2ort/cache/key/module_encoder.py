"""The encoder of ``torch.nn.Module``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from torch2ort.cache.key.constant_bytes import words

if TYPE_CHECKING:
    from torch2ort.cache.key.object_encoder import ObjectEncoder

# Attributes of a module that its forward never sees.
_MODULE_SKIPPED = words(
    """training _non_persistent_buffers_set _state_dict_hooks _state_dict_pre_hooks _load_state_dict_pre_hooks
    _load_state_dict_post_hooks"""
)
# Tables of hooks; their keys are numbers that count all hooks of the process.
_HOOKS = words(
    """_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks _forward_hooks_with_kwargs
    _forward_hooks_always_called _forward_pre_hooks_with_kwargs"""
)
_WEIGHTS = words("_buffers _parameters")
# The tables of hooks that a call reads; the others contain details of the same hooks.
_CALLED = words("_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks")
_TABLES = _HOOKS | _WEIGHTS | words("_modules")
# Lists of a recurrent layer's parameters, which the layer rebuilds whenever one of them is set.
_FLAT = words("_flat_weights _flat_weight_refs")
_OF_MODULES = _MODULE_SKIPPED | _TABLES | _FLAT
# The mode counts, whatever code reads it.
_UNREAD = (_MODULE_SKIPPED | _FLAT) - {"training"}


def module(encoder: ObjectEncoder, module: torch.nn.Module) -> None:
    """Write a reference to a ``torch.nn.Module``."""
    if isinstance(module, torch.jit.ScriptModule):
        encoder.walk.refuse(
            f"a {type(module).__qualname__} keeps its code outside of Python, where it cannot be "
            f"compared between processes",
            module,
        )
        return
    path = encoder.walk.modules.get(id(module))
    label = f"module {path or '(the model)'}" if path is not None else "module outside of the model"
    encoder.walk.refer(label, id(module), lambda: _module(encoder, module))


def _module(encoder: ObjectEncoder, module: torch.nn.Module) -> None:
    encoder.definitions.class_(type(module))
    attributes = module.__dict__
    _guard_module(encoder, module)
    unread = encoder.unread.of(attributes)
    for name in sorted(attributes):
        value = attributes[name]
        if name in unread:
            continue
        if name not in _OF_MODULES:
            encoder.attribute(name, value)
        elif name not in _MODULE_SKIPPED and (value or name not in _TABLES):
            _table(encoder, module, name, value)


def _guard_module(encoder: ObjectEncoder, module: torch.nn.Module) -> None:
    guards, place, attributes = encoder.walk.guards, encoder.walk.place, module.__dict__
    guards.type_of(module, f"the class of {place}")
    skipped = _UNREAD | encoder.unread.of(attributes)
    guards.attributes(attributes, _called(encoder, module), skipped=skipped)
    if id(module) in encoder.walk.modules:
        encoder.fed.update(id(v) for v in attributes.values() if isinstance(v, torch.Tensor))
    else:
        encoder.walk.atom(module.training)  # the modes of the model's own modules have a component
    # The model's own weights are inputs of a graph; the values of others are its constants.
    guard = guards.tensors if id(module) in encoder.walk.modules else guards.items
    for name in sorted(_WEIGHTS):
        guard(attributes[name], f"{name} of {place}")
    for name in ("_modules", *(() if id(module) in encoder.unhooked else sorted(_CALLED))):
        guards.items(attributes[name], f"{name} of {place}")


def _called(encoder: ObjectEncoder, module: torch.nn.Module) -> str:
    """Return the description of a module, for people."""
    path, kind = encoder.walk.modules.get(id(module)), type(module).__name__
    if path is None:
        return f"a {kind} outside of the model"
    return f"the {kind} '{path}'" if path else f"the {kind}"


def _table(encoder: ObjectEncoder, module: torch.nn.Module, name: str, value: Any) -> None:
    """Write a module's table of hooks, weights or submodules."""
    if name in _HOOKS:
        value = list(value.values())
    elif name in _TABLES:
        value = list(value.items())
    of_weights = name in _WEIGHTS or (name in _FLAT and isinstance(module, torch.nn.RNNBase))
    write = functools.partial(encoder.write, value)
    if of_weights:
        write = functools.partial(_table_of_weights, encoder, value)
    if name in _TABLES:
        # Torch's own code reads these, and the walk does not inspect that code.
        encoder.walk.atom(name)
        write()
    else:
        encoder.walk.attribute(name, write)


def _table_of_weights(encoder: ObjectEncoder, items: Iterable[Any]) -> None:
    """Write a module's own table of parameters or buffers, in which tracing finds them."""
    for item in items:
        for part in item if type(item) is tuple else (item,):
            value = part() if isinstance(part, weakref.ref) else part
            if isinstance(value, torch.Tensor) and id(value) in encoder.walk.weights:
                encoder.weight(value)
            else:
                encoder.write(part)
