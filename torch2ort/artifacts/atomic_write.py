"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path beside ``path`` to write to: what is there at the end takes its place.

    Args:
        path: the file; it stays as it is if an exception leaves the block.
    """
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield beside
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def write(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file.

    Args:
        path: the file.
        content: all of it.

    Raises:
        OSError: it cannot be written, and is as it was.
    """
    with replacing(path) as file:
        file.write_bytes(content)
