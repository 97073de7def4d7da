"""Selection of elements by a tensor of one number: ``x[i]``, ``x[:, i]``.

torch.export reads the number and selects by it. With the tensor as index no number is read, and the index is
checked like any other.
"""

from __future__ import annotations

import torch

from torch2ort.program.alias_analysis import first_of, written_by
from torch2ort.program.fx_insert import insert_call
from torch2ort.program.runtime_assertions import READS

aten = torch.ops.aten


def select_by_tensors(graph: torch.fx.Graph) -> None:
    """Replace selections by a number that is read out of a tensor by selections by the tensor.

    The result is no view any more, so a selection from memory that the program writes into is kept.

    Args:
        graph: a program's nodes, not yet functional; changed in place.
    """
    selected = [
        (node, read)
        for node in graph.nodes
        if node.target is aten.select.int
        and isinstance(read := node.args[2], torch.fx.Node)
        and read.target in READS
    ]
    written = {first_of(target) for node in graph.nodes for target in written_by(node)}
    for node, read in selected:
        (index,) = read.all_input_nodes
        dtype = index.meta["val"].dtype
        if dtype is torch.bool or dtype.is_floating_point or first_of(node) in written:
            continue
        tensor, dim, _ = node.args
        dim %= tensor.meta["val"].dim()
        index = insert_call(node, aten.reshape.default, insert_call(node, aten.detach.default, index), [])
        if dtype != torch.int64:
            index = insert_call(node, aten._to_copy.default, index, dtype=torch.int64)
        made = insert_call(node, aten.index.Tensor, tensor, [*[None] * dim, index])
        node.replace_all_uses_with(made)
        graph.erase_node(node)
        if not read.users:
            graph.erase_node(read)
