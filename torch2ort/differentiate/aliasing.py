"""Tensors from outside of the graph that share memory with values that backward reads.

The rules are those of eager PyTorch, where a write to such a tensor before backward is an error.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator

import torch

from torch2ort.differentiate.joint_trace import Joint
from torch2ort.pythonop import TENSOR, Site, site_by_key
from torch2ort.pythonop.python_op_autograd import DIFFERENTIABLE_PYTHON_OP

aten = torch.ops.aten
# A view costs nothing, so its base is saved instead of one more tensor.
VIEWS = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
        aten.expand.default,
        aten.permute.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
        aten._unsafe_view.default,
    }
)
_CLONE = aten.clone.default


class ReadMemory:
    """Memory that backward reads, or that Functions hold for their backward.

    Args:
        joint: the joint graph.
        read: nodes whose values backward reads.
    """

    def __init__(self, joint: Joint, read: Collection[torch.fx.Node]) -> None:
        self._joint = joint
        self._memories = {owner_of(node) for node in (*read, *held_by_functions(joint))}

    @property
    def inputs(self) -> set[int]:
        """Positions of the program's inputs whose memory it is."""
        return {i for node, i in self._joint.inputs.items() if node in self._memories}

    def has_output(self, position: int) -> bool:
        """Return True if the memory of an output of the program is among it."""
        node = self._joint.outputs[position]
        if position in self._joint.shared and node.target is _CLONE:
            node = node.all_input_nodes[0]
        return owner_of(node) in self._memories


def owner_of(node: torch.fx.Node) -> torch.fx.Node:
    """Return the node that allocated the memory of ``node``."""
    while True:
        if node.target in VIEWS:
            node = node.all_input_nodes[0]
            continue
        argument = _mapped(node)
        if argument is None:
            return node
        node = argument


def _mapped(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the argument of a Function that ``node``, one of its outputs, is declared to be a view of."""
    if node.target is not operator.getitem or node.args[0].target is not DIFFERENTIABLE_PYTHON_OP:  # type: ignore[union-attr]
        return None
    tensors, site = _call(node.args[0])  # type: ignore[arg-type]
    outputs = [i for i, value in enumerate(site.known_result.outputs) if value is TENSOR]
    maps = {outputs.index(o): a for o, a in site.known_result.views.items()}
    argument = maps.get(node.args[1])  # type: ignore[arg-type]
    return None if argument is None else tensors[site.tensor_positions.index(argument)]


def held_by_functions(joint: Joint) -> Iterator[torch.fx.Node]:
    """Yield the values that Functions hold after forward."""
    for node in joint.graph_module.graph.nodes:
        if node.target is not DIFFERENTIABLE_PYTHON_OP:
            continue
        tensors, site = _call(node)
        if not any(site.needs_input_grad):
            continue  # autograd saves no context for it
        held, results = site.known_result.kept, site.known_result.kept_results
        yield from (t for t, p in zip(tensors, site.tensor_positions, strict=True) if p in held)
        for user in node.users:
            if user.target is operator.getitem and (results is None or user.args[1] in results):
                yield user


def _call(node: torch.fx.Node) -> tuple[list[torch.fx.Node], Site]:
    """Return the tensors and the site of a call of a Function."""
    tensors, key = node.args
    return tensors, site_by_key(key)  # type: ignore[return-value, arg-type]
