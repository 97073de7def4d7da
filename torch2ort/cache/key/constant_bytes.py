"""Bytes of plain Python values: equal bytes if and only if type and value are equal.

Every form is a letter, a length and a body, so that a sequence of forms can be read in one way only.
No form depends on the process, that is, on addresses, hash seeds or the order of a set.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch

_TORCH_NAMED = (torch.dtype, torch.layout, torch.memory_format, torch.device)


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


def form(letter: bytes, body: bytes) -> bytes:
    """Return one form: the letter of its type, the length, and the content."""
    return b"%s%d:%s" % (letter, len(body), body)


def atom(value: Any) -> bytes | None:
    """Return the bytes of ``value``, or ``None`` if it is not a plain value.

    Plain values are ``None``, ``bool``, ``int``, ``float``, ``complex``, ``str``, ``bytes``, ``...``,
    ``NotImplemented``, dtypes, devices, layouts and memory formats; and tuples, frozensets, slices, ranges
    and ``torch.Size`` of plain values.
    """
    make = _FORMS.get(type(value))
    return None if make is None else make(value)


def _text(value: str) -> bytes:
    body = value.encode("utf-8", "surrogatepass")
    return b"s%d:%s" % (len(body), body)


def _float(value: float) -> bytes:
    return struct.pack("<d", value)  # also distinguishes 0.0 from -0.0


def _sequence(letter: bytes) -> Callable[[Any], bytes | None]:
    def make(values: Any) -> bytes | None:
        parts = [atom(v) for v in values]
        return None if None in parts else form(letter, b"".join(parts))  # type: ignore[arg-type]

    return make


def _frozenset(values: frozenset[Any]) -> bytes | None:
    parts = [atom(v) for v in values]
    return None if None in parts else form(b"Z", b"".join(sorted(parts)))  # type: ignore[type-var,arg-type]


def _slice(value: slice) -> bytes | None:
    return _sequence(b"L")((value.start, value.stop, value.step))


_FORMS: dict[type, Callable[[Any], bytes | None]] = {
    type(None): lambda _: b"N",
    type(Ellipsis): lambda _: b"E",
    type(NotImplemented): lambda _: b"n",
    bool: lambda v: b"T" if v else b"F",
    int: lambda v: form(b"i", b"%x" % v if v >= 0 else b"-%x" % -v),
    float: lambda v: form(b"f", _float(v)),
    complex: lambda v: form(b"c", _float(v.real) + _float(v.imag)),
    str: _text,
    bytes: lambda v: form(b"b", v),
    tuple: _sequence(b"t"),
    torch.Size: _sequence(b"S"),
    frozenset: _frozenset,
    slice: _slice,
    range: lambda v: _sequence(b"R")((v.start, v.stop, v.step)),
    **{kind: lambda v: form(b"o", str(v).encode()) for kind in _TORCH_NAMED},
}
