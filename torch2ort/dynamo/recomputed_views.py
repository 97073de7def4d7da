"""Views of forward's values that backward reads: made anew there, so that what they are views of is kept.

In eager PyTorch a view costs nothing. As a result of a session it is a copy: of each weight that backward
reads the other way round, for one.
"""

from __future__ import annotations

from typing import Any

import torch

from torch2ort._torch import dynamo as private
from torch2ort.differentiate.aliasing import VIEWS


def repeat_views(joint: torch.fx.GraphModule, outputs: int) -> None:
    """Have backward read views of its own.

    What forward writes to is left out: the view holds what was there before.

    Args:
        joint: AOTAutograd's joint graph; changed in place.
        outputs: how many of its results are forward's.
    """
    if any(map(private.runs_again, joint.graph.nodes)):
        return  # checkpointed code says itself what backward makes anew
    backward = private.of_backward(joint)
    own = set(backward)
    kept = {argument for argument, _ in private.writes_of(joint, outputs)}
    made: dict[torch.fx.Node, torch.fx.Node] = {}

    def anew(node: torch.fx.Node) -> torch.fx.Node:
        if node in own or not _is_fixed_view(node) or _viewed(node) in kept:
            return node
        if node not in made:
            source: Any = node.args[0]
            made[node] = joint.graph.call_function(node.target, (anew(source), *node.args[1:]), node.kwargs)  # type: ignore[arg-type]
            made[node].meta = private.as_of_backward(node.meta)
        return made[node]

    for node in backward:
        if node.op == "call_function":
            with joint.graph.inserting_before(node):
                node.args = torch.fx.map_arg(node.args, anew)
                node.kwargs = torch.fx.map_arg(node.kwargs, anew)


def _is_fixed_view(node: torch.fx.Node) -> bool:
    """Whether a node is a view whose arguments are numbers known beforehand."""
    return node.target in VIEWS and len(node.all_input_nodes) == 1


def _viewed(node: torch.fx.Node) -> torch.fx.Node:
    while node.target in VIEWS:
        node = node.all_input_nodes[0]
    return node
