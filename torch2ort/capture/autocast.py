"""What ``torch.autocast`` is set to, beside each operator of a trace.

torch.export records what is above autocast: each operator with the tensors that the model's code gives it.
They are cast below. :mod:`torch2ort.program.autocast_casts` makes casts of these notes.
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
    """What autocast is set to at a node.

    Attributes:
        state: its settings.
        region: number of the outermost ``with torch.autocast``, whose end empties the cache, as does
            ``torch.clear_autocast_cache()``.
    """

    state: Autocast
    region: int


@contextlib.contextmanager
def noted(cache: bool) -> Iterator[None]:
    """Let the nodes that are traced inside note what autocast is set to.

    Args:
        cache: whether autocast keeps its casts; torch.export has it forget them.
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
