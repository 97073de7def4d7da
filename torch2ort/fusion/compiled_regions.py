"""Compiled regions: made by torch's inductor, kept in the export cache, loaded once a process."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch2ort.cache.key.key import Key
from torch2ort.cache.store.graph_entries import keep
from torch2ort.cache.store.store import Store
from torch2ort.errors import EngineError
from torch2ort.fusion.accuracy_check import difference
from torch2ort.fusion.compile import Run, Unmade, make, restored, surroundings
from torch2ort.fusion.library_loader import NativeRegion
from torch2ort.support.user_warnings import warn


@dataclass
class _Libraries:
    """The regions of the process by their texts; ``None`` for one that was not to be had."""

    loaded: dict[str, Run | None] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


_LIBRARIES = _Libraries()


def library_of(text: str) -> Run:
    """What runs a region that :func:`compiled` was asked for.

    Args:
        text: of the region.

    Raises:
        EngineError: nobody asked, or there was no compiler.
    """
    run = _LIBRARIES.loaded.get(text)
    if run is None:
        raise EngineError(
            "a fused region of the graph is not compiled in this process. Delete the export cache, or set "
            "Options(fuse=False)"
        )
    return run


def native_of(text: str) -> NativeRegion | None:
    """The region as a node can call it without Python; ``None`` if it cannot.

    Args:
        text: of the region.
    """
    run = _LIBRARIES.loaded.get(text)
    return run if isinstance(run, NativeRegion) else None


def compiled(texts: Iterable[str], store: Store | None) -> frozenset[str]:
    """The regions that can be run as one kernel each: found in the store, or compiled now, all at once.

    Args:
        texts: of the regions.
        store: where libraries are kept; ``None`` keeps them for this process alone.
    """
    wanted = list(dict.fromkeys(texts))
    with _LIBRARIES.lock:
        missing = [text for text in wanted if text not in _LIBRARIES.loaded]
        _LIBRARIES.loaded.update(obtained(missing, store))
        return frozenset(text for text in wanted if _LIBRARIES.loaded[text] is not None)


def obtained(texts: Sequence[str], store: Store | None) -> dict[str, Run | None]:
    """What runs each region: out of the store, or compiled now; ``None``, with a warning, if it cannot be.

    Args:
        texts: of the regions, each once.
        store: as for :func:`compiled`.
    """
    found: dict[str, Run | None] = {}
    keys: dict[str, Key] = {}
    if texts and store is not None:
        beside = surroundings()
        keys = {text: Key.of("region", {"region": text, **beside}) for text in texts}
        for text, key in keys.items():
            entry = store.read(key.digest)
            run = None if entry is None else restored(text, entry)
            if run is not None:
                found[text] = run
    for text, made in make([text for text in texts if text not in found]).items():
        if isinstance(made, Unmade):
            warn(
                f"Options(fuse=True): torch's inductor does not compile a region here ({made.reason}), so "
                f"its operators run one by one. Is there a C++ compiler?"
            )
            found[text] = None
            continue
        differs = difference(text, made.run)
        if differs:
            warn(f"Options(fuse=True): a compiled region is not used, as its {differs}.")
        elif store is not None:
            keep(store, keys[text], "fused region", made.kept)
        found[text] = None if differs else made.run
    return found
