"""Files that no other user can have written: made for their owner alone, and checked before they are read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UntrustedError(Exception):
    """A file or directory that another user owns or can write to; the message is a clause."""


def check_owner(status: os.stat_result, what: str) -> None:
    """Raise :class:`UntrustedError` if another user owns or can write to ``what``, whose status is given."""
    if status.st_uid != os.geteuid():
        raise UntrustedError(f"{what} belongs to user {status.st_uid}, expected user {os.geteuid()}")
    if status.st_mode & _OTHERS_WRITE:
        raise UntrustedError(
            f"{what} can be written to by others (mode {stat.S_IMODE(status.st_mode):04o}), expected 0700; "
            f"run `chmod go-w` on it"
        )


def private_directory(path: Path) -> None:
    """Make a directory of mode 0700, with its parents, or check the one that exists.

    Raises:
        UntrustedError: it belongs to another user, or others can write to it.
        OSError: it cannot be made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(path.stat(), f"the directory {path}")


@contextmanager
def opened_directory(path: Path) -> Iterator[int]:
    """Open a directory of this user; the descriptor still refers to it after another takes its name.

    Raises:
        UntrustedError: it belongs to another user, or others can write to it.
        FileNotFoundError: it does not exist.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        check_owner(os.fstat(descriptor), f"the directory {path}")
        yield descriptor
    finally:
        os.close(descriptor)


def read_file(name: str, directory: int) -> bytes:
    """Return the content of a regular file of this user.

    Raises:
        UntrustedError: it belongs to another user, others can write to it, or it is not a regular file.
        OSError: it cannot be read.
    """
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    with open(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedError(f"{name} is no regular file")
        check_owner(status, f"the file {name}")
        return stream.read()


def write_file(path: Path, content: bytes) -> None:
    """Make a file of mode 0600 and wait until it is on the disk.

    Raises:
        OSError: it exists, or the disk is full.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(descriptor)


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
