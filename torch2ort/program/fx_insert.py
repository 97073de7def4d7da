"""One more operator in a program."""

from __future__ import annotations

from typing import Any

import torch

from torch2ort._torch import decompositions as private
from torch2ort.support.provenance import origin_of


def insert_call(place: torch.fx.Node, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
    """A call of an operator in front of a node, as part of what that node's line of the model computes.

    Args:
        place: the node.
        target: the operator.
        *args: its arguments; nodes where it takes what they give.
        **kwargs: likewise.

    Raises:
        RuntimeError, TypeError: the operator refuses its arguments.
    """
    values, named = torch.fx.map_arg((args, kwargs), lambda node: node.meta["val"])
    mode = private.fake_mode(place.graph)
    assert mode is not None, "a program without tensors has no operators"
    with mode, torch.no_grad():
        result = target(*values, **named)
    with place.graph.inserting_before(place):
        made = place.graph.call_function(target, args, kwargs)
    made.meta = {**origin_of(place), "val": result}
    return made
