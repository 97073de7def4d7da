"""A joint graph apart: forward, and the backward for a set of outputs that have a gradient.

Forward computes what the outputs need, and every Function and every random number. What backward reads of
it is kept, or computed anew from what is kept where that is cheap.
"""

from __future__ import annotations

import operator
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import cast

import torch

from torch2ort._torch.aot import graph_module
from torch2ort.differentiate.aliasing import VIEWS
from torch2ort.differentiate.joint_trace import Joint
from torch2ort.differentiate.recompute import DEFAULT_SHARE, recomputed
from torch2ort.differentiate.symbolic_shapes import (
    SizeNodes,
    carried,
    carrier,
    is_of_parts,
    nameless,
    same_sizes,
    symbols_in,
)
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.program.dim_order import inverse, order_of_memory, permuted
from torch2ort.program.internal_ops import must_compute, number_as_sizes, of_sizes
from torch2ort.program.kernel_sites import is_random
from torch2ort.pythonop.python_op_autograd import DIFFERENTIABLE_PYTHON_OP, PYTHON_OP_GRAD
from torch2ort.support.provenance import source_line

aten = torch.ops.aten
_PYTHON_OP = torch.ops.torch2ort.python_op.default


@dataclass(frozen=True)
class Half:
    """A functional graph of tensors.

    Attributes:
        graph_module: the graph.
        inputs: what each placeholder is, a node of the joint graph.
        outputs: what each result is, a node of the joint graph; each once.
    """

    graph_module: torch.fx.GraphModule
    inputs: tuple[torch.fx.Node, ...]
    outputs: tuple[torch.fx.Node, ...]


class Split:
    """Which nodes of a joint graph run in forward.

    Args:
        joint: the graph.
        fuses: whether the halves' operators run in fused regions.
        share: of the step's time that backward may take to recompute what is not kept.

    Attributes:
        read: nodes whose value backward reads; placeholders among them.
        kept: those of them that it does not compute anew; behind them copies of inputs that it computes from,
            and what tells sizes that they do not.

    Raises:
        UnsupportedOperatorError: backward draws random numbers.
    """

    def __init__(self, joint: Joint, *, fuses: bool = False, share: float = DEFAULT_SHARE) -> None:
        self._joint = joint
        self._dependent = dependent_on(joint.graph_module.graph, joint.tangents)
        results = [*joint.outputs, *joint.written.values()]
        given = [n for n in joint.graph_module.graph.nodes if n not in self._dependent]
        # Of what a number is read out of, nodes read the sizes, which are no arguments of theirs here.
        run = [n for n in given if _is_impure(n) or n.target is number_as_sizes]
        self._forward = ancestors([*results, *run]) | joint.inputs.keys()
        for node in joint.graph_module.graph.nodes:
            if node.target is operator.getitem and node.args[0] in self._forward:
                self._forward.add(node)
        misplaced = [n for n in self._dependent if is_random(n) or n.target is DIFFERENTIABLE_PYTHON_OP]
        if misplaced or not self._forward.isdisjoint(self._dependent):
            where = misplaced[0] if misplaced else next(iter(self._forward & self._dependent))
            raise UnsupportedOperatorError(
                f"the backward of {source_line(where)} draws random numbers or calls a Function's forward, "
                f"which a training graph does not take. Put that part of the model into a "
                f"torch.autograd.Function"
            )
        self._tokens = _tokens(joint.graph_module.graph)
        self.read = self._read_by_backward()
        self._again, copied = recomputed(joint, self.read, fuses=fuses, share=share)
        kept = tuple(node for node in self.read if node not in self._again)
        self._sizes = self._sizes_beside(kept)
        self._copies = {node: _copy_of(node) for node in copied}
        sizes = () if self._sizes is None else (self._sizes,)
        self.kept = (*kept, *self._copies.values(), *sizes)
        # Kept values that go from half to half as they lie in memory, and the order of dimensions there.
        lying = {node: _order_in_memory(node) for node in kept if node not in {*results, *joint.inputs}}
        self._lying = {node: order for node, order in lying.items() if order is not None}

    def _read_by_backward(self) -> tuple[torch.fx.Node, ...]:
        """Nodes of forward that backward reads, in the order of the graph."""
        found: set[torch.fx.Node] = set()
        seen: set[torch.fx.Node] = set()
        stack = list(self._joint.gradients.values())
        while stack:
            node = stack.pop()
            if node in seen or node in self._tokens:
                continue
            seen.add(node)
            if self._is_kept(node):
                found.add(node)
            elif node not in self._joint.tangents:
                stack.extend(node.all_input_nodes)
        return tuple(n for n in self._joint.graph_module.graph.nodes if n in found)

    def _is_kept(self, node: torch.fx.Node) -> bool:
        return node in self._forward and (node.target not in VIEWS or node.op == "placeholder")

    def _sizes_beside(self, kept: Collection[torch.fx.Node]) -> torch.fx.Node | None:
        """What stands for a tensor with the sizes that backward needs and no tensor that is kept has."""
        wanted: set[str] = set()
        calls = (n for n in self._dependent if n.target is PYTHON_OP_GRAD)
        for node in ancestors((*self._joint.gradients.values(), *calls), stop={*kept, *self._tokens}):
            # Zeros stand for what depends on a gradient that is missing.
            shape = node.meta["val"].shape if node in self._dependent and _is_tensor(node) else ()
            wanted.update(symbols_in((node.args, node.kwargs, tuple(shape))))
        wanted.update(symbols_in([tuple(node.meta["val"].shape) for node in kept if _has_parts(node)]))
        wanted.difference_update(*(carried(node.meta["val"]) for node in kept))
        if not wanted:
            return None
        nodes = self._joint.graph_module.graph.nodes
        return carrier(wanted, [n for n in nodes if n not in self._dependent and _is_tensor(n)])

    def forward(self) -> Half:
        """The forward graph: outputs, new values of written inputs, what backward reads."""
        joint = self._joint
        graph = torch.fx.Graph()
        values: dict[torch.fx.Node, torch.fx.Node] = {}
        wanted = [*joint.outputs, *joint.written.values(), *self.kept]
        outputs = tuple(dict.fromkeys(n for n in wanted if n not in joint.inputs))
        running = [n for n in self._forward if n not in self._tokens]
        read = {*self.kept, *(given for n in running for given in n.all_input_nodes)}
        read.update(self._with_sizes_of(running, read))
        inputs = tuple(n for n in joint.inputs if n in read)
        sizes = SizeNodes(graph)
        for node in joint.graph_module.graph.nodes:
            if node in joint.inputs:
                if node in read:
                    values[node] = placeholder_of(graph, node)
            elif node in self._forward and node not in self._tokens:
                made = values[node] = copied_node(graph, node, sizes, values.__getitem__)
                if node.target is DIFFERENTIABLE_PYTHON_OP:
                    made.target, made.meta["val"] = _PYTHON_OP, list(node.meta["val"])[:-1]
        if self._sizes is not None:
            values[self._sizes] = _zeros(graph, self._sizes, sizes)
        for node, copy in self._copies.items():
            values[copy] = graph.call_function(aten.clone.default, (values[node],))
            values[copy].meta = dict(node.meta)
        for node in self._lying:
            values[node] = permuted(values[node], self._lying[node])
        graph.output(tuple(values[n] for n in outputs))
        return Half(graph_module(graph), inputs, outputs)

    def _with_sizes_of(
        self, running: Iterable[torch.fx.Node], read: Collection[torch.fx.Node]
    ) -> list[torch.fx.Node]:
        """Inputs that forward needs besides ``read``, to know the sizes in its nodes."""
        wanted = {symbol for node in running for symbol in symbols_in((node.args, node.kwargs))}
        if self._sizes is not None:
            wanted.update(carried(self._sizes.meta["val"]))
        order = sorted(self._joint.inputs, key=lambda node: node not in read)
        found = []
        for node in order:
            new = wanted & carried(node.meta["val"]).keys()
            wanted -= new
            if new:
                found.append(node)
        return found

    def backward(self, missing: Collection[int]) -> tuple[Half, dict[int, torch.fx.Node]]:
        """The backward graph, and the node of each input's gradient.

        Args:
            missing: positions of the outputs that have no gradient.
        """
        joint = self._joint
        present = _Present(joint, self._dependent, missing)
        graph = torch.fx.Graph()
        inputs = (*self.kept, *(n for n, output in joint.tangents.items() if output not in missing))
        values = {node: placeholder_of(graph, node) for node in inputs}
        for node, order in self._lying.items():
            values[node].meta["val"] = values[node].meta["val"].permute(order)
        for node, order in self._lying.items():
            values[node] = permuted(values[node], inverse(order))
        sizes = SizeNodes(graph)
        for node in inputs:
            if _has_parts(node):
                values[node] = _with_names(graph, values[node], node, sizes)
        gradients = {i: n for i, n in joint.gradients.items() if not present.is_zero(n)}
        outputs = tuple(dict.fromkeys(gradients.values()))
        needed = ancestors(outputs, stop={*values, *self._tokens}) - self._tokens
        again = ChainMap({node: values[copy] for node, copy in self._copies.items()}, values)
        for node in joint.graph_module.graph.nodes:
            # Another backward may have to read what a Function's call gave nobody.
            wanted = node in needed or (node.target is PYTHON_OP_GRAD and not present.is_zero(node))
            if not wanted or node in values or node.op == "placeholder" or present.is_zero(node):
                continue
            self._copy(graph, node, again, present, sizes)
        graph.output(tuple(values[present.stands_for(n)] for n in outputs))
        half = Half(graph_module(graph), inputs, outputs)
        half.graph_module.graph.eliminate_dead_code()
        return half, gradients

    def _copy(
        self,
        graph: torch.fx.Graph,
        node: torch.fx.Node,
        again: ChainMap[torch.fx.Node, torch.fx.Node],
        present: _Present,
        sizes: SizeNodes,
    ) -> None:
        """Put a node of the joint graph, and what it reads, into the backward graph.

        ``again`` has what is computed of copies, in front of the other values.
        """
        values = again.parents
        if present.stands_for(node) is not node:
            return
        for read in node.all_input_nodes:
            source = present.stands_for(read)
            if source not in values and source not in self._tokens and not present.is_zero(source):
                self._copy(graph, source, again, present, sizes)
            if present.is_zero(source) and source not in values and node.target is not PYTHON_OP_GRAD:
                values[source] = _zeros(graph, source, sizes)
        if node.target is PYTHON_OP_GRAD:
            _, gradients, site, shapes = node.args
            given = [
                None if grad is None or present.is_zero(grad) else values[present.stands_for(grad)]
                for grad in cast("list[torch.fx.Node | None]", gradients)
            ]
            shapes = sizes.mapped(shapes, values.__getitem__)
            made = graph.call_function(PYTHON_OP_GRAD, (None, given, site, shapes))
            made.meta = dict(node.meta)
            values[node] = made
        elif node in self._again:
            values[node] = copied_node(graph, node, sizes, again.__getitem__)
        else:
            values[node] = copied_node(graph, node, sizes, lambda n: values[present.stands_for(n)])
            if not again.maps[0].keys().isdisjoint(node.all_input_nodes) and node not in self._dependent:
                # A view that both what is computed anew and a derivative may read.
                again[node] = copied_node(graph, node, sizes, again.__getitem__)


class _Present:
    """What is left of a backward graph when some outputs have no gradient.

    A backward graph is linear in the gradients that come in: what depends on missing ones alone is zero, and
    autograd does not compute it.
    """

    def __init__(self, joint: Joint, dependent: set[torch.fx.Node], missing: Collection[int]) -> None:
        self._zero = {n for n, output in joint.tangents.items() if output in missing}
        self._same: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in joint.graph_module.graph.nodes if self._zero else ():
            if node not in dependent or node.op != "call_function":
                continue
            read = [n for n in node.all_input_nodes if n in dependent]
            left = [n for n in read if n not in self._zero]
            if not left:
                self._zero.add(node)
            elif (
                node.target is aten.add.Tensor and len(left) < len(read) == 2 and _is_plain_sum(node, left[0])
            ):
                self._same[node] = left[0]

    def is_zero(self, node: torch.fx.Node) -> bool:
        """Whether a node is the gradient of nothing."""
        return node in self._zero

    def stands_for(self, node: torch.fx.Node) -> torch.fx.Node:
        """The node whose value it has."""
        while node in self._same:
            node = self._same[node]
        return node


def _is_plain_sum(node: torch.fx.Node, term: torch.fx.Node) -> bool:
    total, value = node.meta["val"], term.meta["val"]
    return not node.kwargs and same_sizes(total, value) and total.dtype == value.dtype


def copied_node(
    graph: torch.fx.Graph,
    node: torch.fx.Node,
    sizes: SizeNodes,
    nodes: Callable[[torch.fx.Node], torch.fx.Node],
) -> torch.fx.Node:
    """A node of a joint graph in a half, which computes its sizes; ``nodes`` gives its arguments."""
    args, kwargs = sizes.mapped((node.args, node.kwargs), nodes)
    made = graph.create_node(node.op, node.target, args, kwargs, node.name)
    made.meta = dict(node.meta)
    return made


def _order_in_memory(node: torch.fx.Node) -> list[int] | None:
    """The order of dimensions in which a value of fixed sizes lies in memory, if that is not its own."""
    value = node.meta["val"]
    if not all(isinstance(size, int) for size in value.shape):
        return None
    order = order_of_memory(value)
    return None if order is None or order == sorted(order) else order


def _copy_of(node: torch.fx.Node) -> torch.fx.Node:
    """A node of no graph that stands for a copy of an input."""
    made = torch.fx.Graph().placeholder(f"{node.name}_copy")
    made.meta = dict(node.meta)
    return made


def _zeros(graph: torch.fx.Graph, node: torch.fx.Node, sizes: SizeNodes) -> torch.fx.Node:
    value = node.meta["val"]
    shape = [sizes.of(size) for size in value.shape]
    made = graph.call_function(aten.full.default, (shape, 0), {"dtype": value.dtype, "device": value.device})
    made.meta = {**node.meta, "val": value}
    return made


def placeholder_of(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
    """An input of a half for a node of the joint graph."""
    made, value = graph.placeholder(node.name), node.meta["val"].detach()
    if not isinstance(value.storage_offset(), int):
        # A half gets memory of the value's own; the number would be taken for one that it can read there.
        with value.fake_mode:
            value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    made.meta = {"val": value}
    return made


def _has_parts(node: torch.fx.Node) -> bool:
    return any(map(is_of_parts, node.meta["val"].shape))


def _with_names(
    graph: torch.fx.Graph, placeholder: torch.fx.Node, node: torch.fx.Node, sizes: SizeNodes
) -> torch.fx.Node:
    """An input that has the sizes of the joint graph's node again, while the placeholder has others."""
    placeholder.meta["val"] = nameless(node.meta["val"])
    made = graph.call_function(of_sizes, (placeholder, [sizes.of(size) for size in node.meta["val"].shape]))
    made.meta = dict(node.meta)
    return made


def dependent_on(graph: torch.fx.Graph, nodes: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    """``nodes``, such as the gradients of outputs, and all that is computed of them."""
    found = set(nodes)
    for node in graph.nodes:
        if node.op == "call_function" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def ancestors(nodes: Iterable[torch.fx.Node], stop: Collection[torch.fx.Node] = ()) -> set[torch.fx.Node]:
    """``nodes`` and all that they are computed of, of ``stop`` nothing further."""
    found: set[torch.fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            if node not in stop:
                stack.extend(node.all_input_nodes)
    return found


def _tokens(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """What ties a Function's backward to its forward, and is no tensor of the model's."""
    return {
        node
        for node in graph.nodes
        if node.target is operator.getitem
        and node.args[0].target is DIFFERENTIABLE_PYTHON_OP
        and node.args[1] == len(node.args[0].meta["val"]) - 1
    }


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_impure(node: torch.fx.Node) -> bool:
    return node.target in (DIFFERENTIABLE_PYTHON_OP, must_compute) or is_random(node)
