"""Compiled regions: made by torch's inductor, stored in the export cache, loaded once per process."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch2ort.cache.key.key import Key
from torch2ort.cache.store.graph_entries import store_entry
from torch2ort.cache.store.store import Store
from torch2ort.errors import EngineError
from torch2ort.fusion.accuracy_check import difference
from torch2ort.fusion.compile import CompileFailure, Run, compile_regions, restored, surroundings
from torch2ort.fusion.library_loader import NativeRegion
from torch2ort.support.user_warnings import warn


@dataclass
class _Libraries:
    """The regions of the process by their texts; ``None`` for one that could not be compiled."""

    loaded: dict[str, Run | None] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


_LIBRARIES = _Libraries()


def runner_of(text: str) -> Run:
    """Return the function that runs a region passed to :func:`compile_or_load` before.

    Args:
        text: of the region.

    Raises:
        EngineError: the region was not passed to it, or could not be compiled.
    """
    run = _LIBRARIES.loaded.get(text)
    if run is None:
        raise EngineError(
            "a fused region of the graph is not compiled in this process. Delete the export cache, or set "
            "Options(fuse=False)"
        )
    return run


def native_of(text: str) -> NativeRegion | None:
    """Return the region in the form that a node calls without Python; ``None`` if it has no such form.

    Args:
        text: of the region.
    """
    run = _LIBRARIES.loaded.get(text)
    return run if isinstance(run, NativeRegion) else None


def compile_or_load(texts: Iterable[str], store: Store | None) -> frozenset[str]:
    """Return the regions that run as one kernel each; those that the store lacks are compiled, all at once.

    Args:
        texts: of the regions.
        store: stores the libraries; ``None`` keeps them for this process only.
    """
    wanted = list(dict.fromkeys(texts))
    with _LIBRARIES.lock:
        missing = [text for text in wanted if text not in _LIBRARIES.loaded]
        _LIBRARIES.loaded.update(load_or_compile(missing, store))
        return frozenset(text for text in wanted if _LIBRARIES.loaded[text] is not None)


def load_or_compile(texts: Sequence[str], store: Store | None) -> dict[str, Run | None]:
    """Return the function that runs each region, loaded or compiled now; else ``None``, with a warning.

    Args:
        texts: of the regions, each once.
        store: as for :func:`compile_or_load`.
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
    for text, made in compile_regions([text for text in texts if text not in found]).items():
        if isinstance(made, CompileFailure):
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
            store_entry(store, keys[text], "fused region", made.kept)
        found[text] = None if differs else made.run
    return found
