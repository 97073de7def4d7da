"""AOTAutograd's joint graph apart."""

from __future__ import annotations

from typing import Any

import torch

from torch2ort.dynamo._torch_private import default_partition
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.symbolics.sites import is_random
from torch2ort.symbolics.source import source_line


def partition(
    joint: torch.fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **others: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Forward and backward of a joint graph, as eager PyTorch parts them.

    Args:
        joint: the graph.
        inputs: of it.
        num_fwd_outputs: how many of its results are forward's.
        others: what AOTAutograd says besides.

    Raises:
        UnsupportedOperatorError: backward draws random numbers.
    """
    forward, backward = default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **others)
    graph = backward.graph
    for node in reversed(graph.nodes):
        if node.op != "call_function" or not is_random(node):
            continue
        if node.users:
            raise UnsupportedOperatorError(
                f"the backward of {source_line(node)} draws random numbers again, which no graph here "
                f"does. Checkpoint a part of the model without dropout"
            )
        # A copy of what forward drew: it would draw once more.
        graph.erase_node(node)
    return forward, backward
