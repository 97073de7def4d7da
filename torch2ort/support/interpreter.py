"""Work of the Python interpreter that grows with what is imported, kept out of a start."""

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
    """Keep the garbage collector from walking, inside of the block, what was there before.

    Imports leave hundreds of thousands of objects that live as long as the process, and a trace makes enough
    to have them walked several times: a tenth of a small start.
    """
    if _somebody_froze():
        yield  # gc.unfreeze() would free theirs, too
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@functools.cache
def _somebody_froze() -> bool:
    """Whether the process had frozen objects before the first export; counting them takes long if it has."""
    return gc.get_freeze_count() > 0


def protocols_read_once() -> contextlib.AbstractContextManager[None]:
    """Context in which ``isinstance`` of a protocol lists its members once, as Python does from 3.12 on.

    onnx_ir asks that of each argument of each node.
    """
    if sys.version_info >= (3, 12):
        return contextlib.nullcontext()
    members: Any = typing._get_protocol_attrs  # type: ignore[attr-defined]
    return replaced(typing, _get_protocol_attrs=functools.cache(members))
