"""Sizes that vary and that a traced program reads off strides."""

from __future__ import annotations

import torch

aten = torch.ops.aten


def read_off_shapes(graph: torch.fx.Graph) -> None:
    """Have sizes read off the shape of an input, as no graph knows its inputs' strides.

    torch reads each size off the first input that has it, which may have it as a stride alone.

    Args:
        graph: a program's nodes; changed in place. A stride that is the size of no input stays.
    """
    strides = graph.find_nodes(op="call_function", target=aten.sym_stride.int)
    shapes = {
        str(size): (node, axis)
        for node in (reversed(graph.find_nodes(op="placeholder")) if strides else ())
        if isinstance(node.meta.get("val"), torch.Tensor)
        for axis, size in enumerate(node.meta["val"].shape)
    }
    for node in strides:
        found = shapes.get(str(node.meta["val"]))
        if found is not None:
            node.target, node.args = aten.sym_size.int, found
