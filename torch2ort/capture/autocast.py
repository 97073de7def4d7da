"""State of ``torch.autocast`` at each operator of a trace.

torch.export records the operators above autocast: each with the tensors that the model's code passes to it.
The casts happen below. :mod:`torch2ort.program.autocast_casts` turns these notes into casts.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Final, NamedTuple

import torch

from torch2ort._torch import export as private
from torch2ort.pythonop.autocast import Autocast
from torch2ort.support.replaced import replaced

NOTE: Final = "torch2ort_autocast"  # in the meta of a node


class Note(NamedTuple):
    """State of autocast at a node.

    Attributes:
        state: its settings.
        region: number of the outermost ``with torch.autocast``, whose end empties the cache, as does
            ``torch.clear_autocast_cache()``.
    """

    state: Autocast
    region: int


@contextlib.contextmanager
def recording_autocast(cache: bool) -> Iterator[None]:
    """Record the state of autocast in the nodes that are traced inside.

    Args:
            cache: True if autocast caches its casts; torch.export switches the cache off.
    """
    regions = itertools.count(1)
    region = 0

    def ended() -> None:
        nonlocal region
        region = next(regions)

    def note(node: torch.fx.Node) -> None:
        node.meta[NOTE] = Note(Autocast.now(), region)

    clear = torch.clear_autocast_cache

    def cleared() -> None:
        ended()
        clear()

    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(cache)
    try:
        with (
            replaced(torch, clear_autocast_cache=cleared),
            private.nodes_noted(note),
            private.no_autocast_nodes(ended),
        ):
            yield
    finally:
        torch.set_autocast_cache_enabled(before)
