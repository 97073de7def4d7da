"""Views of forward's values that backward reads: backward recomputes them, and forward saves their bases.

In eager PyTorch a view costs nothing. As a result of a session a view is a copy, for example of each weight
that backward reads transposed.
"""

from __future__ import annotations

from typing import Any

import torch

from torch2ort._torch import dynamo as private
from torch2ort.differentiate.aliasing import VIEWS


def repeat_views(joint: torch.fx.GraphModule, outputs: int) -> None:
    """Let backward recompute the views that it reads.

    Views of tensors that forward writes to are excluded: such a view has the values before the write.

    Args:
        joint: AOTAutograd's joint graph; changed in place.
        outputs: the number of its results that are forward's.
    """
    if any(map(private.runs_again, joint.graph.nodes)):
        return  # checkpointed code itself determines what backward recomputes
    backward = private.of_backward(joint)
    own = set(backward)
    kept = {argument for argument, _ in private.writes_of(joint, outputs)}
    made: dict[torch.fx.Node, torch.fx.Node] = {}

    def recomputed(node: torch.fx.Node) -> torch.fx.Node:
        if node in own or not _is_fixed_view(node) or _viewed(node) in kept:
            return node
        if node not in made:
            source: Any = node.args[0]
            target: Any = node.target
            made[node] = joint.graph.call_function(target, (recomputed(source), *node.args[1:]), node.kwargs)
            made[node].meta = private.as_of_backward(node.meta)
        return made[node]

    for node in backward:
        if node.op == "call_function":
            with joint.graph.inserting_before(node):
                node.args = torch.fx.map_arg(node.args, recomputed)
                node.kwargs = torch.fx.map_arg(node.kwargs, recomputed)


def _is_fixed_view(node: torch.fx.Node) -> bool:
    """Return True if a node is a view whose other arguments are numbers known at compile time."""
    return node.target in VIEWS and len(node.all_input_nodes) == 1


def _viewed(node: torch.fx.Node) -> torch.fx.Node:
    while node.target in VIEWS:
        node = node.all_input_nodes[0]
    return node
