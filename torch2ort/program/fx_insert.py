"""Insertion of an operator into a program, and replacement of a call."""

from __future__ import annotations

import operator
import typing
from collections.abc import Sequence
from typing import Any

import torch

from torch2ort._torch import fake_tensors as private
from torch2ort.support.provenance import origin_of


def insert_call(place: torch.fx.Node, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
    """Insert a call of an operator in front of a node, as part of that node's line of the model.

    Args:
        place: the node.
        target: the operator.
        *args: its arguments; a node for each argument that another node computes.
        **kwargs: its keyword arguments, likewise.

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


def replace_call(node: torch.fx.Node, results: Sequence[torch.fx.Node]) -> None:
    """Replace a call's results by other nodes, and erase the call.

    Args:
        node: the call; with several results, each user must select one.
        results: a node for each result.
    """
    if not isinstance(node.meta.get("val"), (list, tuple)):
        node.replace_all_uses_with(results[0])
    else:
        for user in list(node.users):
            assert user.target is operator.getitem, f"{user} takes all outputs of {node} at once"
            user.replace_all_uses_with(results[typing.cast(int, user.args[1])])
            node.graph.erase_node(user)
    node.graph.erase_node(node)
