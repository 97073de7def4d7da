"""Buffers that forward assigns to.

When forward ends, the trace writes the assigned value into the buffer. In eager PyTorch, the assignment puts
another tensor in the buffer's place, and backward continues to read the first tensor. Here, backward reads a
copy of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torch2ort.program.alias_analysis import shared_with, written_by
from torch2ort.support.provenance import files_of
from torch2ort.support.source_lines import is_users

aten = torch.ops.aten


def read_from_copies(graph: torch.fx.Graph) -> None:
    """Replace the reads of each buffer that forward assigns to by reads of a copy.

    Args:
        graph: nodes of a program, not yet functional, with its regions without gradient inlined; changed in
            place.
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
    """Yield ``node`` and the nodes whose memory it shares, up to the one that allocated it."""
    found: torch.fx.Node | None = node
    while found is not None:
        yield found
        found = shared_with(found)
