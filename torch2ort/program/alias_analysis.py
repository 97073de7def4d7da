"""Aliases in a program that is not functional yet: nodes that return, or write into, the memory of others."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch


def shared_with(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the argument whose memory ``node`` returns; ``None`` if it returns memory of its own."""
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, torch.fx.Node)
        return source if shared_with(source) is not None else None
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(r.alias_info is not None for r in schema.returns):
        return None
    for argument, value in zip(schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and isinstance(value, torch.fx.Node):
            return value if _dtype(value) == _dtype(node) else None
    return None


def tensor_itself(node: torch.fx.Node) -> torch.fx.Node:
    """Return the node that made the tensor which ``node`` returns after writing into it."""
    while (source := shared_with(node)) is not None and source in written_by(node):
        node = source
    return node


def written_by(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield the arguments that ``node`` writes into."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return
    for argument, value in zip(schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            values = value if isinstance(value, (list, tuple)) else (value,)
            yield from (v for v in values if isinstance(v, torch.fx.Node))


def writes_outside(node: torch.fx.Node) -> bool:
    """Return True if ``node`` writes into memory of an input of the program."""
    return any(first_of(target).op == "placeholder" for target in written_by(node))


def first_of(node: torch.fx.Node) -> torch.fx.Node:
    """Return the node whose memory ``node`` returns."""
    *_, first = sources_of(node)
    return first


def sources_of(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield the node, and those whose memory it returns; the last one is the node that made it."""
    source: torch.fx.Node | None = node
    while source is not None:
        yield source
        source = shared_with(source)


def _dtype(node: torch.fx.Node) -> object:
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        value = value[0] if value else None
    return getattr(value, "dtype", None)
