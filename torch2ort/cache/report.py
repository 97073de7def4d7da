"""What the export cache did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheReport:
    """What the export cache did for one export.

    Attributes:
        hit: whether the graph came from the cache.
        key: name of the cache entry; ``None`` if none was computed.
        bypass_reason: why the export was not cached, in a sentence; ``None`` if it was.
    """

    hit: bool = False
    key: str | None = None
    bypass_reason: str | None = None
