"""Operators that return one of their arguments, such as ``x.float()`` for an ``x`` of float32.

In a trace their result belongs to the last operator that returned it. Under ``torch.no_grad()`` that would
cut off the gradient of a tensor from outside.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from torch2ort.sizes.symbols import size_hint


def argument_itself(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the argument that ``node`` returns itself; ``None`` if it returns another tensor.

    Args:
        node: the result of an operator, or one of its several results.
    """
    several = node.target is operator.getitem
    call = node.args[0] if several else node
    if not isinstance(call, torch.fx.Node) or not _may_return_arguments(call.target):
        return None
    candidates = [n for n in call.all_input_nodes if _is_alike(n, node)]
    if not candidates:
        return None
    # Only PyTorch itself determines if an operator returns its argument or a view of it.
    tensors: dict[torch.fx.Node, Any] = {n: _of_its_kind(n.meta.get("val")) for n in call.all_input_nodes}
    args = torch.fx.map_arg(call.args, tensors.__getitem__)
    kwargs = torch.fx.map_arg(call.kwargs, tensors.__getitem__)
    with torch.no_grad():
        result = call.target(*args, **kwargs)  # type: ignore[operator]
    result = result[node.args[1]] if several else result
    return next((n for n in candidates if tensors[n] is result), None)


def _may_return_arguments(target: object) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and not schema.is_mutable and schema.name.startswith("aten::")


def _is_alike(one: torch.fx.Node, other: torch.fx.Node) -> bool:
    """Return True if two tensors are the same part of one memory in the trace."""
    geometry = _geometry(one)
    return geometry is not None and geometry == _geometry(other)


def _geometry(node: torch.fx.Node) -> tuple[object, ...] | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    memory = value.untyped_storage()._cdata
    return memory, value.dtype, str(value.shape), str(value.stride()), str(value.storage_offset())


def _of_its_kind(value: Any) -> Any:
    """Return a real tensor or number for one of a trace."""
    if isinstance(value, torch.Tensor):
        sizes, strides = map(size_hint, value.shape), map(size_hint, value.stride())
        return torch.empty_strided(tuple(sizes), tuple(strides), dtype=value.dtype, device=value.device)
    if isinstance(value, (list, tuple)):
        return [_of_its_kind(v) for v in value]
    return size_hint(value) if isinstance(value, torch.SymInt) else value
