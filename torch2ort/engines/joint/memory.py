"""Which tensors from outside share memory with what backward reads.

It goes by what eager PyTorch does: a write to one of them before backward is an error there.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator

import torch

from torch2ort.engines.joint.split import VIEWS
from torch2ort.engines.joint.trace import Joint
from torch2ort.pythonop import TENSOR, Site, site_by_key
from torch2ort.pythonop.differentiable import DIFFERENTIABLE_PYTHON_OP
from torch2ort.runtime.inplace import views_only

_CLONE = torch.ops.aten.clone.default


class ReadMemory:
    """Memory that backward reads, or that Functions hold for it.

    Args:
        joint: the graph.
        kept: nodes whose value backward reads.
    """

    def __init__(self, joint: Joint, kept: Collection[torch.fx.Node]) -> None:
        self._joint = joint
        self._memories = {_owner(node) for node in (*kept, *_held(joint))}

    @property
    def inputs(self) -> set[int]:
        """Positions of the program's inputs among it."""
        return {i for node, i in self._joint.inputs.items() if node in self._memories}

    def has_output(self, position: int) -> bool:
        """Whether it is an output of the program."""
        node = self._joint.outputs[position]
        if position in self._joint.shared and node.target is _CLONE:
            node = node.all_input_nodes[0]
        return _owner(node) in self._memories


def _owner(node: torch.fx.Node) -> torch.fx.Node:
    """The node that made the memory of another."""
    while True:
        if node.target in VIEWS:
            node = node.all_input_nodes[0]
            continue
        argument = _mapped(node)
        if argument is None:
            return node
        node = argument


def _mapped(node: torch.fx.Node) -> torch.fx.Node | None:
    """The argument of a Function that one of its outputs is declared to be a view of."""
    if node.target is not operator.getitem or node.args[0].target is not DIFFERENTIABLE_PYTHON_OP:  # type: ignore[union-attr]
        return None
    tensors, site = _call(node.args[0])  # type: ignore[arg-type]
    outputs = [i for i, value in enumerate(site.known_result.outputs) if value is TENSOR]
    maps = {outputs.index(o): a for o, a in views_only(site).forward.items()}
    argument = maps.get(node.args[1])  # type: ignore[arg-type]
    return None if argument is None else tensors[site.tensor_positions.index(argument)]


def _held(joint: Joint) -> Iterator[torch.fx.Node]:
    """Values that Functions hold after forward."""
    for node in joint.graph_module.graph.nodes:
        if node.target is not DIFFERENTIABLE_PYTHON_OP:
            continue
        tensors, site = _call(node)
        held, results = site.known_result.kept, site.known_result.kept_results
        yield from (t for t, p in zip(tensors, site.tensor_positions, strict=True) if p in held)
        for user in node.users:
            if user.target is operator.getitem and (results is None or user.args[1] in results):
                yield user


def _call(node: torch.fx.Node) -> tuple[list[torch.fx.Node], Site]:
    """Tensors and site of a call of a Function."""
    tensors, key = node.args
    return tensors, site_by_key(key)  # type: ignore[return-value, arg-type]
