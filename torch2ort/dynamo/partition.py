"""AOTAutograd's joint graph apart."""

from __future__ import annotations

from typing import Any

import torch

from torch2ort.dynamo._torch_private import default_partition
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.pythonop.differentiable import DIFFERENTIABLE_PYTHON_OP, PYTHON_OP_GRAD
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
    _leave_to_forward(backward.graph)
    return forward, backward


def _leave_to_forward(graph: torch.fx.Graph) -> None:
    """Take the copies of what forward does for more than its result out of a backward, and what they read.

    Raises:
        UnsupportedOperatorError: backward reads what one of them gives.
    """
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node.target is PYTHON_OP_GRAD:
            continue
        if not node.users:
            graph.erase_node(node)
        elif node.target is DIFFERENTIABLE_PYTHON_OP or is_random(node):
            raise UnsupportedOperatorError(
                f"the backward of {source_line(node)} draws random numbers or calls a Function's "
                f"forward again, which no graph here does. Checkpoint a part of the model without those"
            )
