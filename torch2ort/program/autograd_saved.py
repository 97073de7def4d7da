"""Tensors that autograd saves of an operator's arguments and results for its derivative."""

from __future__ import annotations

import typing
from collections.abc import Collection
from typing import Any

import torch

from torch2ort._torch import fake_tensors as private
from torch2ort.pythonop.abstract_run.tensor_rollback import memory


def saved_for_backward(node: torch.fx.Node, carried: Collection[torch.fx.Node]) -> frozenset[torch.fx.Node]:
    """Return those of an operator's arguments and results that eager PyTorch's derivative reads.

    They are found by running the operator once more, over tensors without data.

    Args:
        node: a call of an operator in a program.
        carried: the arguments that carry a gradient.

    Returns:
        Arguments of the node; the node itself for its result, or the nodes that select saved ones out of
        several results. All of them if the operator does not run over tensors without data.
    """
    mode = private.fake_mode(node.graph)
    assert mode is not None, "a program without tensors has no derivatives"
    saved = set()
    inputs = node.all_input_nodes

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.update(memory((tensor,)))
        return tensor.detach()

    try:
        with mode, torch.enable_grad():
            given = {n: _own(n.meta["val"], n in carried) for n in inputs}
            arguments, keywords = torch.fx.map_arg((node.args, node.kwargs), given.__getitem__)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                result = node.target(*arguments, **keywords)  # type: ignore[operator]
    except Exception:  # an operator may raise anything where it has no data
        return frozenset((*inputs, node, *node.users))
    values: dict[torch.fx.Node, Any] = {**given, node: result}
    if isinstance(result, (list, tuple)):
        values.update((user, result[typing.cast(int, user.args[1])]) for user in node.users)
    return frozenset(n for n, value in values.items() if memory((value,)) & saved)


def _own(value: Any, carries: bool) -> Any:
    """Return a tensor in its own, writable memory for a tensor; any other value unchanged."""
    if isinstance(value, (list, tuple)):
        return [_own(v, carries) for v in value]
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(carries and value.is_floating_point()).clone()
