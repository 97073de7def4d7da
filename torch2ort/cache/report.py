"""Report of the export cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheReport:
    """Report of the export cache on one export.

    Attributes:
        hit: True if the graph came from the cache.
        key: name of the cache entry; ``None`` if none was computed.
        bypass_reason: the reason why the export was not cached, as a sentence; ``None`` if it was.
    """

    hit: bool = False
    key: str | None = None
    bypass_reason: str | None = None
