"""Temporary replacement of attributes of another library's modules and classes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of a module or class inside of the block.

    Args:
        owner: the module or class. All threads share it: if some must not see the change, the new attributes
            have to distinguish them.
        attributes: name -> value; each name is an existing attribute of ``owner``.
    """
    before = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
