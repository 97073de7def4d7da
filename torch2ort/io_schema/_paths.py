"""Paths through nested data: as Python writes them in messages, and as names of tensors."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from types import NoneType
from typing import Any

import optree
import torch

from torch2ort.io_schema._structure import Node, paths_of

_SHOWN_STEPS = 12  # a message shows a longer path without its middle


def written(path: Sequence[optree.PyTreeEntry], root: str) -> str:
    """Return `path` as Python code that starts at the variable `root`, such as ``data['past'][1]``."""
    if len(path) <= _SHOWN_STEPS:
        return optree.PyTreeAccessor(path).codify(root)
    half = _SHOWN_STEPS // 2
    head = optree.PyTreeAccessor(path[:half]).codify(root)
    return f"{head}...{optree.PyTreeAccessor(path[-half:]).codify('')} ({len(path)} levels deep)"


def tensor_names(nodes: Sequence[Node]) -> tuple[str, ...]:
    """Return the names of the tensor leaves among `nodes`, in order; no two are the same.

    A name is the path joined by ``_``. Of several leaves with the same one, the leaf with the shortest path
    keeps it (of equally short ones, the first); to each other, ``_2``, ``_3``, ... is appended, the first
    that makes a new name.
    """
    paths = [path for node, path in zip(nodes, paths_of(nodes), strict=True) if node.kind == "tensor"]
    joined = ["_".join(map(_segment, path)) for path in paths]
    taken = set(joined)
    names = [""] * len(joined)
    named: set[str] = set()
    for index in sorted(range(len(joined)), key=lambda index: len(paths[index])):
        name, count = joined[index], 1
        if name in named:
            while name in taken:
                count += 1
                name = f"{joined[index]}_{count}"
        taken.add(name)
        named.add(name)
        names[index] = name
    return tuple(names)


def _segment(entry: optree.PyTreeEntry) -> str:
    """Return the part of a name that one step of a path adds."""
    if isinstance(entry, (optree.NamedTupleEntry, optree.StructSequenceEntry)):
        return entry.field if entry.field.isidentifier() else str(entry.entry)
    if isinstance(entry, optree.DataclassEntry):
        return entry.name
    return _key_segment(entry.entry)


def _key_segment(key: Any) -> str:
    if isinstance(key, enum.Enum):
        return key.name
    if type(key) is tuple:
        return "_".join(map(_key_segment, key))
    if type(key) in (str, bool, int, float, NoneType) or isinstance(key, torch.dtype):
        return str(key)
    # The text of other objects may contain an address, which changes from run to run.
    return type(key).__name__ if not isinstance(key, type) else key.__name__
