"""Buffers that forward assigns to.

The trace writes what was assigned into the buffer when forward ends. In eager PyTorch another tensor stands
in its place from then on, and backward goes on reading the first: so does it here, from a copy.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torch2ort.program.alias_analysis import shared_with, written_by
from torch2ort.support.provenance import files_of
from torch2ort.support.source_lines import is_users

aten = torch.ops.aten


def read_from_copies(graph: torch.fx.Graph) -> None:
    """Have what reads a buffer that forward assigns to read a copy.

    Args:
        graph: a program's nodes, not yet functional, its regions without gradient inlined.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    writes: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in order:
        for target in written_by(node):
            writes.setdefault(list(to_memory(target))[-1], []).append(node)
    for buffer, (write, *others) in writes.items():
        if buffer.op != "placeholder" or others or write.target is not aten.copy_.default:
            continue
        way = {write, *to_memory(write.args[0])}  # type: ignore[arg-type]
        readers = [user for user in buffer.users if user not in way]
        if any(map(is_users, files_of(write))) or any(order[r] > order[write] for r in readers):
            continue
        with graph.inserting_before(next(n for n in order if n.op != "placeholder")):
            copy = graph.call_function(aten.clone.default, (buffer,))
        copy.meta = dict(buffer.meta)
        for reader in readers:
            reader.replace_input_with(buffer, copy)


def to_memory(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """``node``, and what it shares memory with, up to the one that made it."""
    found: torch.fx.Node | None = node
    while found is not None:
        yield found
        found = shared_with(found)
