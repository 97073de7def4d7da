"""Errors for data that cannot be flattened, with the path of the first obstacle."""

from __future__ import annotations

from typing import Any

import optree

from torch2ort.errors import SchemaError
from torch2ort.io_schema._containers import ADVICE
from torch2ort.io_schema._leaves import SYMBOLIC_TYPES, UnsupportedError, is_leaf, type_name
from torch2ort.io_schema._paths import written
from torch2ort.io_schema._structure import open_one

_Path = tuple[optree.PyTreeEntry, ...]


def explain(data: Any, root: str, cause: Exception | None) -> SchemaError:
    """Return the error that describes the first obstacle in `data`.

    Args:
        data: The nested data, as given to ``flatten``.
        root: Name of the variable `data` in the path.
        cause: Exception that flattening raised, or None.
    """
    deepest: _Path = ()
    pending: list[tuple[_Path, Any, tuple[Any, ...]]] = [((), data, ())]
    while pending:
        path, value, ancestors = pending.pop()
        if is_leaf(value):
            continue
        for depth, ancestor in enumerate(ancestors):
            if ancestor is value:
                return SchemaError(
                    f"{written(path, root)}: refers back to {written(path[:depth], root)}, and a cycle "
                    "cannot be flattened. Pass the data without that reference."
                )
        deepest = max(deepest, path, key=len)
        if len(path) > optree.MAX_RECURSION_DEPTH:
            break
        try:
            opened = open_one(value)
        except UnsupportedError as error:
            return SchemaError(f"{written(path, root)}: {error}")
        if opened is None:
            return SchemaError(f"{written(path, root)}: {_unsupported(value)}")
        node, children = opened
        steps = list(zip(node.entries, children, strict=True))
        pending += [((*path, entry), child, (*ancestors, value)) for entry, child in reversed(steps)]
    if isinstance(cause, RecursionError):
        return SchemaError(
            f"{written(deepest, root)}: nested too deep; at most {optree.MAX_RECURSION_DEPTH} levels can be "
            "flattened. Pass flatter data."
        )
    return SchemaError(
        f"{root}: its containers held something else when they were taken apart a second time. Pass data "
        "that does not change by being read."
    )


def _unsupported(value: Any) -> str:
    """Return the reason why `value` is not a leaf, and what to do."""
    if isinstance(value, SYMBOLIC_TYPES):
        return (
            f"expected a tensor, got a {type_name(type(value))}: a Python number that depends on a tensor's "
            "size or data cannot be an output. Return it as a tensor, or do not return it."
        )
    return (
        "expected a tensor, None, a str, bool, int or float, or a container of them, got a value of type "
        f"{type_name(type(value))}. {ADVICE}"
    )
