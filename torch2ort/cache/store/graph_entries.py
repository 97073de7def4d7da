"""What belongs to one exported graph in the store: the graph itself, and what engines build from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch2ort.cache.key.export_lock import exclusive
from torch2ort.cache.key.key import Key
from torch2ort.cache.store.store import RefusedError, Store, manifest_of
from torch2ort.log import logger
from torch2ort.support.startup_timing import LOOK_UP, timed


@dataclass(frozen=True)
class Kept:
    """What is kept of a built thing.

    Attributes:
        data: any JSON object.
        files: content by file name.
    """

    data: Mapping[str, Any]
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class Shelf:
    """The entries of one exported graph.

    Attributes:
        store: where they are.
        key: the graph's key.
    """

    store: Store
    key: Key

    def obtain(self, kind: str, settings: Mapping[str, str], make: Callable[[], Kept]) -> Kept:
        """What ``make`` gives, out of the store if it is there, else made now and stored.

        One process makes it; others that want it meanwhile wait and then read it.

        Args:
            kind: what it is, for people.
            settings: all that it depends on besides the graph.
            make: builds it.
        """
        key = Key.of(self.key.name, {"graph": self.key.digest, "kind": kind, **settings})
        kept = self._read(key)
        if kept is not None:
            return kept
        with exclusive.looking(), self.store.lock(key.digest) as locked:
            # Another process may have made it while this one waited.
            kept = self._read(key) if locked else None
            if kept is None:
                kept = make()
                keep(self.store, key, kind, kept)
        return kept

    @timed(LOOK_UP)
    def _read(self, key: Key) -> Kept | None:
        entry = self.store.read(key.digest)
        if entry is None:
            return None
        logger.debug(
            "took the %s of %s out of the export cache (%s)", entry.manifest.kind, key.name, key.digest
        )
        return Kept(entry.manifest.data, entry.files)


@timed(LOOK_UP)
def keep(store: Store, key: Key, kind: str, kept: Kept) -> str | None:
    """Add an entry to the store.

    Returns:
        Why the store does not take it; ``None`` if it is there now.
    """
    try:
        store.write(manifest_of(key.digest, kind, key.name, key.components, kept.data), kept.files)
    except RefusedError as error:
        logger.info("the %s of %s is not cached: %s", kind, key.name, error)
        return str(error)
    logger.debug("cached the %s of %s as %s", kind, key.name, key.digest)
    return None
