"""The split of a joint graph into forward, and a backward for a set of outputs that have a gradient.

Forward computes the outputs, and runs every Function and every random operator. The values of forward that
backward reads are saved, or recomputed from saved values where that is cheap.
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
from torch2ort.program.node_dependencies import ancestors, dependent_on
from torch2ort.pythonop.python_op_autograd import DIFFERENTIABLE_PYTHON_OP, PYTHON_OP_GRAD
from torch2ort.support.provenance import source_line

aten = torch.ops.aten
_PYTHON_OP = torch.ops.torch2ort.python_op.default


@dataclass(frozen=True)
class Half:
    """A functional graph of tensors.

    Attributes:
        graph_module: the graph.
        inputs: the node of the joint graph that each placeholder represents.
        outputs: the node of the joint graph that each result represents; each once.
    """

    graph_module: torch.fx.GraphModule
    inputs: tuple[torch.fx.Node, ...]
    outputs: tuple[torch.fx.Node, ...]


class Split:
    """The nodes of a joint graph that run in forward, and the values that it saves for backward.

    Args:
        joint: the graph.
        fuses: whether the halves' operators run in fused regions.
        share: fraction of the step's time that backward may spend on recomputing values that are not saved.

    Attributes:
        read: nodes whose values backward reads, placeholders included.
        kept: values that forward saves for backward, in the order of backward's inputs: the nodes of ``read``
            that backward does not recompute; copies of inputs from which it recomputes others; and, if the
            shapes of these lack sizes that backward needs, a tensor whose shape has them.

    Raises:
        UnsupportedOperatorError: backward draws random numbers.
    """

    def __init__(self, joint: Joint, *, fuses: bool = False, share: float = DEFAULT_SHARE) -> None:
        self._joint = joint
        self._dependent = dependent_on(joint.graph_module.graph, joint.tangents)
        results = [*joint.outputs, *joint.written.values()]
        given = [n for n in joint.graph_module.graph.nodes if n not in self._dependent]
        # A number that is read from a tensor is a size of the result of number_as_sizes. Nodes contain that
        # size as a symbol, not as a node among their arguments, so number_as_sizes is not their ancestor.
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
        # Saved values that are passed in their memory layout, with the order of dimensions in it.
        lying = {node: _order_in_memory(node) for node in kept if node not in {*results, *joint.inputs}}
        self._lying = {node: order for node, order in lying.items() if order is not None}

    def _read_by_backward(self) -> tuple[torch.fx.Node, ...]:
        """Return the nodes of forward that backward reads, in the order of the graph.

        If backward reads a view, the tensor that it views is returned, and backward makes the view again.
        """
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
        """Return the node of a tensor for the sizes that backward needs and no saved tensor has, if any."""
        wanted: set[str] = set()
        calls = (n for n in self._dependent if n.target is PYTHON_OP_GRAD)
        for node in ancestors((*self._joint.gradients.values(), *calls), stop={*kept, *self._tokens}):
            # Zeros replace values that depend on a missing gradient.
            shape = node.meta["val"].shape if node in self._dependent and _is_tensor(node) else ()
            wanted.update(symbols_in((node.args, node.kwargs, tuple(shape))))
        wanted.update(symbols_in([tuple(node.meta["val"].shape) for node in kept if _has_parts(node)]))
        wanted.difference_update(*(carried(node.meta["val"]) for node in kept))
        if not wanted:
            return None
        nodes = self._joint.graph_module.graph.nodes
        return carrier(wanted, [n for n in nodes if n not in self._dependent and _is_tensor(n)])

    def forward(self) -> Half:
        """Build the forward graph: outputs, new values of written inputs, and values that backward reads."""
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
        """Return the inputs that forward needs besides ``read``, for the sizes in its nodes."""
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
        """Build the backward graph, and map each input's position to the node of its gradient.

        Args:
            missing: positions of the outputs without a gradient.
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
            # The call of a Function's backward is copied even if its gradients are unused: another backward
            # may have to read its results.
            wanted = node in needed or (node.target is PYTHON_OP_GRAD and not present.is_zero(node))
            if not wanted or node in values or node.op == "placeholder" or present.is_zero(node):
                continue
            self._copy(graph, node, again, present, sizes)
        graph.output(tuple(values[present.replacement_of(n)] for n in outputs))
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
        """Copy a node of the joint graph, and the nodes that it reads, into the backward graph.

        ``again`` contains the values that are computed from copies, in front of the other values.
        """
        values = again.parents
        if present.replacement_of(node) is not node:
            return
        for read in node.all_input_nodes:
            source = present.replacement_of(read)
            if source not in values and source not in self._tokens and not present.is_zero(source):
                self._copy(graph, source, again, present, sizes)
            if present.is_zero(source) and source not in values and node.target is not PYTHON_OP_GRAD:
                values[source] = _zeros(graph, source, sizes)
        if node.target is PYTHON_OP_GRAD:
            _, gradients, site, shapes = node.args
            given = [
                None if grad is None or present.is_zero(grad) else values[present.replacement_of(grad)]
                for grad in cast("list[torch.fx.Node | None]", gradients)
            ]
            shapes = sizes.map_arguments(shapes, values.__getitem__)
            made = graph.call_function(PYTHON_OP_GRAD, (None, given, site, shapes))
            made.meta = dict(node.meta)
            values[node] = made
        elif node in self._again:
            values[node] = copied_node(graph, node, sizes, again.__getitem__)
        else:
            values[node] = copied_node(graph, node, sizes, lambda n: values[present.replacement_of(n)])
            if not again.maps[0].keys().isdisjoint(node.all_input_nodes) and node not in self._dependent:
                # A view that both a recomputed value and a derivative may read.
                again[node] = copied_node(graph, node, sizes, again.__getitem__)


class _Present:
    """The part of a backward graph that remains when some outputs have no gradient.

    A backward graph is linear in the outputs' gradients. A node that depends only on missing ones is zero,
    and autograd does not compute it.
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
        """Return True if a node depends only on gradients that are missing."""
        return node in self._zero

    def replacement_of(self, node: torch.fx.Node) -> torch.fx.Node:
        """Return the node that has the value of ``node``: the other term of a sum with a missing gradient."""
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
    """Copy a node of a joint graph into a half, which computes its sizes; ``nodes`` maps its arguments."""
    args, kwargs = sizes.map_arguments((node.args, node.kwargs), nodes)
    made = graph.create_node(node.op, node.target, args, kwargs, node.name)
    made.meta = dict(node.meta)
    return made


def _order_in_memory(node: torch.fx.Node) -> list[int] | None:
    """Return the order of dimensions in memory of a value of fixed sizes; ``None`` for the default order."""
    value = node.meta["val"]
    if not all(isinstance(size, int) for size in value.shape):
        return None
    order = order_of_memory(value)
    return None if order is None or order == sorted(order) else order


def _copy_of(node: torch.fx.Node) -> torch.fx.Node:
    """Return a node of no graph that represents a copy of an input."""
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
    """Add an input to a half for a node of the joint graph."""
    made, value = graph.placeholder(node.name), node.meta["val"].detach()
    if not isinstance(value.storage_offset(), int):
        # A half gets a tensor with its own memory, and would read the offset's symbol as a size of an input.
        with value.fake_mode:
            value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    made.meta = {"val": value}
    return made


def _has_parts(node: torch.fx.Node) -> bool:
    return any(map(is_of_parts, node.meta["val"].shape))


def _with_names(
    graph: torch.fx.Graph, placeholder: torch.fx.Node, node: torch.fx.Node, sizes: SizeNodes
) -> torch.fx.Node:
    """Return an input with the sizes of the joint graph's node; its placeholder gets other sizes."""
    placeholder.meta["val"] = nameless(node.meta["val"])
    made = graph.call_function(of_sizes, (placeholder, [sizes.of(size) for size in node.meta["val"].shape]))
    made.meta = dict(node.meta)
    return made


def _tokens(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return the results that connect a Function's backward to its forward, which are no tensors."""
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
