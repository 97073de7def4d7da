"""The first difference of two structures, as a sentence."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

from torch2ort.io_schema._leaves import exact, type_name
from torch2ort.io_schema._paths import written
from torch2ort.io_schema._structure import MAPPING_KINDS, Node, paths_of

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 60
_shown.maxlist = _shown.maxtuple = 12


def difference(expected: Sequence[Node], given: Sequence[Node], root: str) -> str | None:
    """Return a sentence on the first node that differs, or None if none does.

    Args:
        expected: Nodes of one structure.
        given: Nodes of the other.
        root: Name of the data's variable in the path.
    """
    found = _first(expected, given, root)
    return None if found is None else f"{found[0]}: {_compare(*found[1:])}"


def differing_path(expected: Sequence[Node], given: Sequence[Node], root: str) -> str | None:
    """Return the path of the first node that differs, or None if none does; see :func:`difference`."""
    found = _first(expected, given, root)
    return None if found is None else found[0]


def _first(expected: Sequence[Node], given: Sequence[Node], root: str) -> tuple[str, Node, Node] | None:
    for path, wanted, got in zip(paths_of(expected), expected, given, strict=False):
        # As long as all nodes so far are equal, the same position is the same path in both.
        if wanted.token != got.token:
            return written(path, root), wanted, got
    return None


def _compare(expected: Node, given: Node) -> str:
    wanted, got = _described(expected), _described(given)
    if expected.kind == given.kind == "tensor":
        return f"expected {wanted}, got {_dtype_name(given)} of rank {given.detail[1]}"
    return f"expected {wanted}, got {'another one' if wanted == got else got}{_details(expected, given)}"


def _described(node: Node) -> str:
    """Return a description of `node` with an article: ``a float32 tensor of rank 3``."""
    if node.kind == "tensor":
        return f"{_with_article(_dtype_name(node))} tensor of rank {node.detail[1]}"
    if node.kind == "constant":
        return (
            "None" if node.detail is None else f"the {type(node.detail).__name__} {_shown.repr(node.detail)}"
        )
    if node.kind in MAPPING_KINDS or node.kind == "dataclass":
        noun = "field" if node.kind == "dataclass" else "key"
        return f"{_with_article(type_name(node.cls))} with {_plural(node.arity, noun)}"
    return f"{_with_article(type_name(node.cls))} of {_plural(node.arity, 'item')}"


def _dtype_name(node: Node) -> str:
    return str(node.detail[0]).removeprefix("torch.")


def _with_article(noun: str) -> str:
    return f"an {noun}" if noun[0].lower() in "aeio" else f"a {noun}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _details(expected: Node, given: Node) -> str:
    """Return the difference of two containers of one class in parentheses, and "" for other nodes."""
    if expected.is_leaf or expected.kind != given.kind or expected.cls is not given.cls:
        return ""
    parts = []
    if exact(expected.keys) != exact(given.keys):
        parts.append(_key_difference(expected.keys, given.keys))
    if exact(expected.detail) != exact(given.detail):
        parts.append(f"expected {_shown.repr(expected.detail)}, got {_shown.repr(given.detail)}")
    return f" ({'; '.join(parts)})" if parts else ""


def _key_difference(expected: tuple[Any, ...], given: tuple[Any, ...]) -> str:
    wanted = {exact(key): key for key in expected}
    got = {exact(key): key for key in given}
    missing = [key for token, key in wanted.items() if token not in got]
    unexpected = [key for token, key in got.items() if token not in wanted]
    parts = []
    if missing:
        parts.append(f"missing: {', '.join(map(_shown.repr, missing))}")
    if unexpected:
        parts.append(f"unexpected: {', '.join(map(_shown.repr, unexpected))}")
    if not parts:
        parts.append(f"in the order {', '.join(map(_shown.repr, given))}")
    return "; ".join(parts)
