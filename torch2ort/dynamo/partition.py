"""AOTAutograd's joint graph apart."""

from __future__ import annotations

from typing import Any

import torch

from torch2ort.dynamo._torch_private import default_partition
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.pythonop.differentiable import DIFFERENTIABLE_PYTHON_OP
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
        UnsupportedOperatorError: backward draws random numbers, or calls a Function's forward.
    """
    forward, backward = default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **others)
    graph = backward.graph
    for node in reversed(graph.nodes):
        if not (node.target is DIFFERENTIABLE_PYTHON_OP or is_random(node)):
            continue
        for part in [part for part in node.users if not part.users and part.op == "call_function"]:
            graph.erase_node(part)
        if node.users:
            raise UnsupportedOperatorError(
                f"the backward of {source_line(node)} draws random numbers or calls a Function's "
                f"forward again, which no graph here does. Checkpoint a part of the model without those"
            )
        # A copy of what forward did: it would do so once more.
        graph.erase_node(node)
    return forward, backward
