"""The folder of entries: each is written once, checked before use, and removed when it is the oldest.

An entry is a folder of files with a manifest. It is written under a temporary name and gets its own by
one rename, so that no reader sees a partial entry; the first writer wins. Manifests are JSON, graphs are
ONNX.
The libraries of fused regions are the only code in entries that is run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from torch2ort.cache.store import manifest as _manifest
from torch2ort.cache.store import private_files as files
from torch2ort.cache.store.manifest import DamagedError, Manifest, sha256
from torch2ort.log import logger
from torch2ort.support.user_warnings import warn

DEFAULT_LIMIT = 1 << 30  # bytes; graphs contain no weights, so this is thousands of graphs
WAIT_SECONDS = 600.0
_FOLDER = f"v{_manifest.VERSION}"
_LEFTOVER_SECONDS = 24 * 3600.0


class RefusedError(Exception):
    """A folder cannot serve as a store, or cannot accept an entry; the message is a sentence."""


@dataclass(frozen=True)
class Entry:
    """An entry as it was written.

    Attributes:
        manifest: the entry's description.
        files: content by name.
    """

    manifest: Manifest
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class Listed:
    """One entry in a listing.

    Attributes:
        manifest: the entry's description.
        size: bytes on disk.
        used: time of the last read, in seconds since 1970.
    """

    manifest: Manifest
    size: int
    used: float


class Store:
    """Entries below one folder, for any number of processes.

    Args:
        folder: the folder; it is made with mode 0700 if it does not exist.
        limit: bytes beyond which the least recently used entries are removed.

    Raises:
        RefusedError: another user owns the folder or can write to it, or it cannot be made.
    """

    def __init__(self, folder: str | os.PathLike[str], limit: int = DEFAULT_LIMIT) -> None:
        path = Path(os.path.realpath(folder))
        self._root = path / _FOLDER
        self._locks = self._root / "locks"
        self._limit = limit
        try:
            files.private_directory(path)
            files.private_directory(self._root)
        except files.UntrustedError as error:
            raise RefusedError(f"the export cache is not used, because {error}.") from error
        except OSError as error:
            raise RefusedError(
                f"the export cache is not used, because its directory cannot be made: {error}."
            ) from error

    # --- reading

    def read(self, digest: str) -> Entry | None:
        """Return the entry of that name; ``None`` if there is none, or, with a warning, if it is damaged."""
        path = self._root / digest
        try:
            with files.opened_directory(path) as directory:
                try:
                    entry = _read(directory, digest)
                    with contextlib.suppress(OSError):  # a read-only store
                        os.utime(directory)
                    return entry
                except (DamagedError, files.UntrustedError, OSError) as error:
                    if _is_still(path, directory):
                        self._drop_damaged(path, error)
                    return None
        except FileNotFoundError:
            return None
        except (files.UntrustedError, OSError) as error:
            warn(f"the export cache's entry {path} is not used: {error}.")
            return None

    def find(self, text: str) -> Iterator[Manifest]:
        """Yield the manifests that contain ``text``, the most recently used entry's first."""
        with contextlib.suppress(OSError):
            for path in sorted(self._entries(), key=lambda path: -path.stat().st_mtime):
                with (
                    contextlib.suppress(OSError, DamagedError, files.UntrustedError),
                    files.opened_directory(path) as directory,
                ):
                    content = files.read_file(_manifest.FILE, directory)
                    if text.encode() in content:
                        yield Manifest.from_bytes(content)

    def list_entries(self) -> list[Listed]:
        """Return every readable entry, the most recently used first."""
        found = []
        for path in self._entries():
            with (
                contextlib.suppress(OSError, DamagedError, files.UntrustedError),
                files.opened_directory(path) as directory,
            ):
                manifest = Manifest.from_bytes(files.read_file(_manifest.FILE, directory))
                found.append(Listed(manifest, _size(path), os.fstat(directory).st_mtime))
        return sorted(found, key=lambda entry: -entry.used)

    # --- writing

    def write(self, manifest: Manifest, content: Mapping[str, bytes]) -> None:
        """Add an entry; an existing one is left as it is.

        Args:
            manifest: the entry's description; its ``files`` are filled in here.
            content: the files' content by name.

        Raises:
            RefusedError: the entry is over the limit, or the disk is full or read-only.
        """
        size = sum(map(len, content.values()))
        if size > self._limit:
            raise RefusedError(
                f"the {manifest.kind} of {manifest.name} has {size} bytes, more than the export cache may "
                f"take ({self._limit}); raise cache_limit."
            )
        hashes = {name: sha256(data) for name, data in content.items()}
        manifest = Manifest(**{**vars(manifest), "files": hashes})
        try:
            self._write(manifest, content)
        except OSError as error:
            raise RefusedError(
                f"the export cache could not be written, so the next start will export again: {error}."
            ) from error
        self._evict(keep=manifest.digest)

    def _write(self, manifest: Manifest, content: Mapping[str, bytes]) -> None:
        temporary = Path(tempfile.mkdtemp(prefix=f".{manifest.digest}.", suffix=".tmp", dir=self._root))
        try:
            for name, data in content.items():
                files.write_file(temporary / name, data)
            files.write_file(temporary / _manifest.FILE, manifest.to_bytes())
            files.sync_directory(temporary)
            try:
                os.rename(temporary, self._root / manifest.digest)
            except OSError:
                # A rename never replaces a folder that is not empty: another process was first.
                if not (self._root / manifest.digest).is_dir():
                    raise
            files.sync_directory(self._root)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    @contextlib.contextmanager
    def lock(self, digest: str, seconds: float = WAIT_SECONDS) -> Iterator[bool]:
        """Lock an entry, so that no other process makes it.

        Args:
            digest: the entry's name.
            seconds: the longest time to wait while another process makes the entry.

        Yields:
            True if the lock was acquired. Otherwise the wait was too long, or the folder is not writable.
        """
        lock = filelock.FileLock(self._locks / f"{digest}.lock", timeout=seconds, mode=0o600)
        try:
            self._locks.mkdir(mode=0o700, exist_ok=True)
            lock.acquire()
        except (OSError, NotImplementedError) as error:  # a Timeout is an OSError, too
            logger.info("no lock for the cache entry %s: %s", digest, error)
        try:
            if lock.is_locked:
                self._remove_leftovers(digest)
            yield lock.is_locked
        finally:
            lock.release()

    # --- removing

    def clear(self) -> tuple[int, int]:
        """Remove every entry, and return the number of entries and of their bytes."""
        entries = self._entries()
        size = sum(map(_size, entries))
        for path in entries:
            self.remove(path.name)
        self._remove_leftovers("", older_than=0.0)
        shutil.rmtree(self._locks, ignore_errors=True)
        return len(entries), size

    def _entries(self) -> list[Path]:
        try:
            return [path for path in self._root.iterdir() if len(path.name) == 64 and path.is_dir()]
        except OSError:
            return []

    def _evict(self, keep: str) -> None:
        with contextlib.suppress(OSError):
            entries = sorted((path.stat().st_mtime, path, _size(path)) for path in self._entries())
            total = sum(size for _, _, size in entries)
            for _, path, size in entries:
                if total <= self._limit:
                    break
                if path.name != keep:
                    self.remove(path.name)
                    total -= size
        self._remove_leftovers("", older_than=_LEFTOVER_SECONDS)

    def remove(self, digest: str) -> None:
        """Remove an entry by one rename, so that no reader finds a partial entry."""
        path = self._root / digest
        doomed = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}.tmp")
        with contextlib.suppress(OSError):
            os.rename(path, doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def _remove_leftovers(self, digest: str, older_than: float = 0.0) -> None:
        """Remove files of killed writers; the lock's holder knows that no other writer is alive."""
        latest = time.time() - older_than
        with contextlib.suppress(OSError):
            for path in self._root.glob(f".{digest}*.tmp"):
                if path.stat().st_mtime <= latest:
                    shutil.rmtree(path, ignore_errors=True)

    def _drop_damaged(self, path: Path, reason: Exception) -> None:
        warn(f"the export cache's entry {path} is damaged and is made again: {reason}.")
        self.remove(path.name)


def _read(directory: int, digest: str) -> Entry:
    manifest = Manifest.from_bytes(files.read_file(_manifest.FILE, directory))
    if manifest.digest != digest:
        raise DamagedError(f"its manifest is that of {manifest.digest}")
    content: dict[str, bytes] = {}
    for name, expected in manifest.files.items():
        if os.path.basename(name) != name:
            raise DamagedError(f"its manifest names the file {name!r}")
        content[name] = files.read_file(name, directory)
        if sha256(content[name]) != expected:
            raise DamagedError(f"its file {name} was changed")
    return Entry(manifest, content)


def _is_still(path: Path, directory: int) -> bool:
    """Return True if ``path`` still leads to the opened directory; another process may have removed it."""
    try:
        status, opened = os.stat(path, follow_symlinks=False), os.fstat(directory)
    except OSError:
        return False
    return (status.st_dev, status.st_ino) == (opened.st_dev, opened.st_ino)


def _size(path: Path) -> int:
    try:
        return sum(file.stat().st_size for file in path.iterdir())
    except OSError:
        return 0


def manifest_of(
    digest: str, kind: str, name: str, components: Mapping[str, str], data: Mapping[str, Any]
) -> Manifest:
    """Return the manifest of an entry that is written now."""
    return Manifest(digest, kind, name, time.time(), dict(components), dict(data), {})
