"""Gradients of tensors that are overwritten as a whole.

In eager PyTorch the gradient of the overwritten value is zeros. A functional program does not read that value
any more, and computes no gradient: an optimiser with weight decay or momentum treats the two differently.
"""

from __future__ import annotations

import torch

from torch2ort._torch import fake_tensors as private
from torch2ort._torch.dispatch import OpOverload
from torch2ort.program.alias_analysis import written_by
from torch2ort.program.fx_insert import insert_call
from torch2ort.program.gradient_storage import TrackedMemory, copied_from

aten = torch.ops.aten

# They write every element of their first argument, and read none.
_WRITE_OVER = frozenset(
    {
        *(aten.copy_, aten.fill_, aten.zero_),
        *(aten.normal_, aten.uniform_, aten.random_, aten.bernoulli_, aten.exponential_),
        *(aten.cauchy_, aten.log_normal_, aten.geometric_),
    }
)


def keep_overwritten(graph: torch.fx.Graph) -> None:
    """Connect each overwritten tensor with a gradient to its new value, so that its gradient is zeros.

    Args:
        graph: the nodes of a program to differentiate, not yet functional; changed in place.
    """
    memory = TrackedMemory()
    for node in list(graph.nodes):
        written = _written_over(node)
        if written is not None and memory.carries(written) and _is_whole(written, memory.base(written)):
            node = _join(node, written)
        memory.add(node)


def _written_over(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the tensor that a node overwrites as a whole, except in a Function's write to its argument."""
    if not isinstance(node.target, OpOverload) or node.target.overloadpacket not in _WRITE_OVER:
        return None
    (written,) = written_by(node)
    call = copied_from(node)
    # The Function itself defines the derivative of its write to an argument.
    return None if call is not None and written in call.all_input_nodes else written


def _is_whole(view: torch.fx.Node, base: torch.fx.Node) -> bool:
    return view is base or private.is_known(view.meta["val"].numel() == base.meta["val"].numel())


def _join(node: torch.fx.Node, written: torch.fx.Node) -> torch.fx.Node:
    """Make a node write to new memory, and copy from there, selected by a condition that is always true.

    Returns:
        The node that replaces ``node``.
    """
    new = insert_call(node, aten.empty_like.default, written)
    wrote = insert_call(node, node.target, new, *node.args[1:], **node.kwargs)
    device = written.meta["val"].device
    always = insert_call(node, aten.full.default, [], True, dtype=torch.bool, device=device)
    chosen = insert_call(node, aten.where.self, always, wrote, written)
    copied = insert_call(node, aten.copy_.default, written, chosen)
    node.replace_all_uses_with(copied)
    node.graph.erase_node(node)
    return copied
