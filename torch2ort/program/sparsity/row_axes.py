"""Dimensions of a tensor that are the rows of a batch, through views of the tensor."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

from torch2ort.sizes.symbols import expression_of, size_hint

BATCH, LENGTH = "batch", "length"
# Both dimensions as one: row (b, l) is at index b * length + l.
ROWS = "rows"
# The tokens that attention reads, in scores and weights whose rows are the tokens that read.
KEYS = "keys"

Axes = tuple[str | None, ...]
Sizes = Sequence[Any]


def size(value: Any) -> Any:
    """Return a size in a form that is equal for equal sizes: an integer or an expression of symbols."""
    return value if isinstance(value, int) else expression_of(value)


def same(one: Any, other: Any) -> bool:
    """Return True if two sizes are equal for all calls of the program."""
    return bool(size(one) == size(other))


def is_packable(axes: Axes) -> bool:
    """Return True if a tensor has rows that a packed tensor can have as its first dimension."""
    return [label for label in axes if label] in ([BATCH, LENGTH], [ROWS])


def dims_of_rows(axes: Axes) -> list[int]:
    """Return the dimensions that are rows."""
    return [i for i, label in enumerate(axes) if label]


def other_dims(axes: Axes) -> list[int]:
    """Return the other dimensions, which a packed tensor has after the first, in the same order."""
    return [i for i, label in enumerate(axes) if not label]


def viewed(axes: Axes, before: Sizes, after: Sizes, rows: Sizes) -> Axes | None:
    """Return the dimensions of a contiguous tensor's view.

    Args:
        axes: the dimensions of the tensor.
        before: the tensor's sizes.
        after: the view's sizes.
        rows: number of sequences, and tokens of each.

    Returns:
        The dimensions; ``None`` if the view splits a dimension of rows or merges it with another one.
    """
    groups = _groups(before, after)
    if groups is None:
        return None
    found: list[str | None] = []
    for old, new in groups:
        labels = _labels([axes[i] for i in old], [before[i] for i in old], [after[i] for i in new], rows)
        if labels is None:
            return None
        found += labels
    return tuple(found)


def _groups(before: Sizes, after: Sizes) -> list[tuple[list[int], list[int]]] | None:
    """Return the shortest ranges of dimensions with equal numbers of elements; ``None`` if it is unknown."""
    groups = []
    i = j = 0
    while i < len(before) or j < len(after):
        old, new = [i] if i < len(before) else [], [j] if j < len(after) else []
        i, j = i + len(old), j + len(new)
        while _product(before, old) != _product(after, new):
            less = _hint(before, old) < _hint(after, new)
            if less and i < len(before):
                old.append(i)
                i += 1
            elif not less and j < len(after):
                new.append(j)
                j += 1
            else:
                return None
        groups.append((old, new))
    return groups


def _product(sizes: Sizes, dims: Sequence[int]) -> Any:
    return functools.reduce(operator.mul, [size(sizes[d]) for d in dims], 1)


def _hint(sizes: Sizes, dims: Sequence[int]) -> int:
    return functools.reduce(operator.mul, [size_hint(sizes[d]) for d in dims], 1)


def _labels(labels: Sequence[str | None], old: Sizes, new: Sizes, rows: Sizes) -> list[str | None] | None:
    """Return the labels of the dimensions ``new``, whose elements are those of ``old``."""
    if not any(labels):
        return [None] * len(new)
    kept = [label for label, length in zip(labels, old, strict=True) if not same(length, 1)]
    places = [i for i, length in enumerate(new) if not same(length, 1)]
    if kept == [BATCH, LENGTH] and len(places) == 1:
        kept = [ROWS]
    elif kept == [ROWS] and len(places) == 2:
        kept = [BATCH, LENGTH]
    if len(kept) != len(places) or (len(kept) > 1 and kept != [BATCH, LENGTH]):
        return None
    if len(kept) == 2 and not all(map(same, [new[p] for p in places], rows)):
        return None
    found: list[str | None] = [None] * len(new)
    for place, label in zip(places, kept, strict=True):
        found[place] = label
    return found
