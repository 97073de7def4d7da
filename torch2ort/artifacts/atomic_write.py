"""Files that are written completely or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path beside ``path`` to write to; at the end of the block, that file replaces ``path``.

    Args:
        path: the file; it does not change if the block raises an exception.
    """
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield beside
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def write(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file, atomically.

    Args:
        path: the file.
        content: its content.

    Raises:
        OSError: it cannot be written; it is unchanged then.
    """
    with replacing(path) as file:
        file.write_bytes(content)
