"""Submodules of a model whose weights FSDP shards among processes (``fully_shard(layer)``).

FSDP gathers the weights of such a module in a hook before its forward and frees them in one after it. A
graph runs no such hooks: the weights of all submodules are gathered for a call and freed after it. Backward
reads copies (``torch2ort/training/resharded_weights.py``), and FSDP shards the gradients at its end, as it
does for modules whose inputs require none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

from torch2ort._torch import call_context as private
from torch2ort.errors import ExportError

_HAS_PROCESSES = torch.distributed.is_available()


def sharded_below(model: torch.nn.Module) -> list[Any]:
    """Return the submodules of ``model``, without itself, whose weights FSDP shards.

    Raises:
        ExportError: FSDP does something with one of them that a graph would not.
    """
    found = {name: module for name, module in _sharded(model) if name}
    for name, module in found.items():
        _refuse_below(type(model).__name__, name, module)
    return list(found.values())


def sharded_in(model: torch.nn.Module) -> list[Any]:
    """Return those of ``model`` and its submodules whose weights FSDP shards.

    Raises:
        ExportError: FSDP does something with one of them that a graph would not.
    """
    found = dict(_sharded(model))
    for name, module in found.items():
        _refuse_types(type(model).__name__, name, module)
    return list(found.values())


@contextlib.contextmanager
def gathered(modules: list[Any]) -> Iterator[None]:
    """Context in which ``modules`` hold their whole weights, and no hooks of FSDP."""
    taken: list[tuple[MutableMapping[int, Any], dict[int, Any]]] = []
    try:
        for module in modules:
            module.unshard()
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                own = {key: hook for key, hook in hooks.items() if private.is_sharding_hook(hook, module)}
                taken.append((hooks, dict(hooks)))
                for key in own:
                    del hooks[key]
        yield
    finally:
        for hooks, before in taken:
            hooks.clear()
            hooks.update(before)
        for module in modules:
            module.reshard()


def has_process_group() -> bool:
    """Return True if there are processes that may share weights; every call of a model checks this."""
    return _HAS_PROCESSES and torch.distributed.is_initialized()


def _sharded(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    if has_process_group():
        from torch.distributed.fsdp import FSDPModule

        yield from ((name, m) for name, m in model.named_modules() if isinstance(m, FSDPModule))


def _refuse_below(kind: str, name: str, module: Any) -> None:
    if private.is_sharded_with_others(module):
        raise ExportError(
            f"{kind}: fully_shard was called with '{name}' and other modules in one list, and a graph does "
            f"not tell when the last of them has run. Call it for each module, or put the ORTModules inside "
            f"of these modules"
        )
    if not private.is_sharded_below_another(module):
        raise ExportError(
            f"{kind}: fully_shard was called for its module '{name}' and not for the model, whose backward "
            f"ends with the gradients of all modules. Call fully_shard(model), too"
        )
    _refuse_types(kind, name, module)


def _refuse_types(kind: str, name: str, module: Any) -> None:
    types = private.sharded_types(module)
    if types.param_dtype is not None or types.output_dtype is not None:
        whose = f"for its module '{name}' " if name else ""
        raise ExportError(
            f"{kind}: fully_shard was called {whose}with a MixedPrecisionPolicy, whose "
            f"casts of arguments and outputs a graph does not have. Use torch.autocast, or give the policy "
            f"to the ORTModule alone"
        )
