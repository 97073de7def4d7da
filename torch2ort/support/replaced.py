"""Attributes of another library's modules and classes, replaced for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Give a module or a class other attributes inside of the block.

    Args:
        owner: the module or class, which all threads share: those that must not see the change have to be
            told apart by the attributes themselves.
        attributes: name -> value; each name is an attribute of ``owner`` already.
    """
    before = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
