"""Entries of one exported graph in the store: the graph itself, and the graphs that engines build from it."""

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
class EntryContent:
    """Content of an entry, as it is stored.

    Attributes:
        data: any JSON object.
        files: content by file name.
    """

    data: Mapping[str, Any]
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class GraphEntries:
    """The entries of one exported graph.

    Attributes:
        store: the store that contains the entries.
        key: the graph's key.
    """

    store: Store
    key: Key

    def obtain(
        self, kind: str, settings: Mapping[str, str], make: Callable[[], EntryContent]
    ) -> EntryContent:
        """Return the result of ``make`` from the store, or call ``make`` and store the result.

        One process makes the entry; others that need it meanwhile wait and then read it.

        Args:
            kind: kind of the entry, for people.
            settings: everything that the entry depends on besides the graph.
            make: builds the entry.
        """
        key = Key.of(self.key.name, {"graph": self.key.digest, "kind": kind, **settings})
        kept = self._read(key)
        if kept is not None:
            return kept
        with exclusive.looking(), self.store.lock(key.digest) as locked:
            # Another process may have made the entry while this one waited.
            kept = self._read(key) if locked else None
            if kept is None:
                kept = make()
                store_entry(self.store, key, kind, kept)
        return kept

    @timed(LOOK_UP)
    def _read(self, key: Key) -> EntryContent | None:
        entry = self.store.read(key.digest)
        if entry is None:
            return None
        logger.debug(
            "took the %s of %s out of the export cache (%s)", entry.manifest.kind, key.name, key.digest
        )
        return EntryContent(entry.manifest.data, entry.files)


@timed(LOOK_UP)
def store_entry(store: Store, key: Key, kind: str, kept: EntryContent) -> str | None:
    """Add an entry to the store.

    Returns:
        The reason why the store refused the entry; ``None`` if it is stored.
    """
    try:
        store.write(manifest_of(key.digest, kind, key.name, key.components, kept.data), kept.files)
    except RefusedError as error:
        logger.info("the %s of %s is not cached: %s", kind, key.name, error)
        return str(error)
    logger.debug("cached the %s of %s as %s", kind, key.name, key.digest)
    return None
