"""Avoidance of work of the Python interpreter that grows with the imported modules, during a start."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import typing
from collections.abc import Iterator
from typing import Any

from torch2ort.support.replaced import replaced


@contextlib.contextmanager
def old_objects_uncollected() -> Iterator[None]:
    """Exclude the objects that exist before the block from garbage collection inside of it.

    Imports leave hundreds of thousands of objects that live as long as the process, and a trace makes enough
    objects to have them traversed several times, which takes a tenth of a small start.
    """
    if _somebody_froze():
        yield  # gc.unfreeze() would also unfreeze objects that other code froze
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@functools.cache
def _somebody_froze() -> bool:
    """Return True if the process had frozen objects before the first export; counting many takes long."""
    return gc.get_freeze_count() > 0


def protocols_read_once() -> contextlib.AbstractContextManager[None]:
    """Return a context in which ``isinstance`` caches a protocol's members, as Python does from 3.12 on.

    onnx_ir calls it for each argument of each node.
    """
    if sys.version_info >= (3, 12):
        return contextlib.nullcontext()
    members: Any = typing._get_protocol_attrs  # type: ignore[attr-defined]
    return replaced(typing, _get_protocol_attrs=functools.cache(members))
