"""Chains of PythonOps, each the only consumer of the one before, as one node.

The work of ONNX Runtime and the operator around a call (finding the node, wrapping its tensors, copying its
output) takes as long as a small Function itself. Between Functions of which each reads the only output of the
one before, none of it is needed: a chain of them is one PythonOp, and its gradient one PythonOpGrad.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from torch2ort.graph.graph_traversal import values_read
from torch2ort.pythonop import Site
from torch2ort.pythonop.site import needed_inputs

# Functions of the user, and PyTorch's own kernels.
_CALLS = frozenset({"PythonOp", "ATen"})


@dataclass(frozen=True, slots=True)
class Chain:
    """The calls of one node.

    Attributes:
        members: names of the PythonOp nodes that it replaces, in order.
        links: for each member, the index of the tensor argument that is the output of the member before; -1
            for the first.
    """

    members: tuple[str, ...]
    links: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of the chain's node."""
        return f"{self.members[0]}..{self.members[-1]}"


def join_python_ops(graph: onnx.GraphProto, sites: Mapping[str, Site]) -> list[Chain]:
    """Replace chains of PythonOps by one node each, in place.

    A chain runs at the place of its last member, so no other PythonOp may be between its members: random
    numbers must be drawn in the program's order.

    Args:
        graph: a session's copy of an exported graph.
        sites: the site of each PythonOp node that may be joined, by node name.

    Returns:
        Chains whose members are named by their PythonOp nodes.
    """
    calls = {node.name: node for node in graph.node if node.op_type in _CALLS and node.name in sites}
    readers = Counter(values_read(graph))
    chains: list[list[tuple[str, int]]] = []
    for name, node in calls.items():
        link = _link(calls[chains[-1][-1][0]], node, sites, readers) if chains else -1
        if link < 0:
            chains.append([])
        chains[-1].append((name, link))
    joined = [Chain(*zip(*members, strict=True)) for members in chains if len(members) > 1]
    new: dict[int, onnx.NodeProto | None] = {}
    for chain in joined:
        nodes = [calls[name] for name in chain.members]
        new.update({id(node): None for node in nodes})
        new[id(nodes[-1])] = _joined_calls(chain, nodes)
    if joined:
        _put(graph, [new.get(id(node), node) for node in graph.node])
    return joined


def _link(
    first: onnx.NodeProto, second: onnx.NodeProto, sites: Mapping[str, Site], readers: Mapping[str, int]
) -> int:
    """Return the index of the input by which the second call may directly follow the first; -1 for none."""
    # The first output is the context.
    made, taken = list(first.output[1:]), list(second.input)
    plain = all(_is_plain(node, sites[node.name]) for node in (first, second))
    if not plain or len(made) != 1 or readers[made[0]] != 1 or made[0] not in taken:
        return -1
    return taken.index(made[0])


def _is_plain(node: onnx.NodeProto, site: Site) -> bool:
    """Return True if a call has tensor inputs, writes to none, and is not declared to return their memory."""
    result = site.known_result
    return len(node.input) > 0 and not result.mutated and not result.forward_map


def _joined_calls(chain: Chain, nodes: Sequence[onnx.NodeProto]) -> onnx.NodeProto:
    attributes = _attributes(nodes[-1])
    return onnx.helper.make_node(
        "PythonOp",
        _without_links(chain, [node.input for node in nodes]),
        ["", *nodes[-1].output[1:]],
        chain.name,
        domain="com.microsoft",
        output_tensor_types=attributes["output_tensor_types"],
        output_tensor_ranks=attributes["output_tensor_ranks"],
    )


def join_python_op_grads(graph: onnx.GraphProto, sites: Mapping[str, Site]) -> list[Chain]:
    """Replace chains of PythonOpGrads by one node each, in place.

    Calls with an operator between them in forward are joined, too, if autograd passes the gradient on
    unchanged. No other PythonOpGrad may be between them: effects of backwards, and random numbers that they
    draw, must come in the program's order. A chain runs at the place of its first node, as nodes in between
    may read a gradient that is not passed along the chain.

    Args:
        graph: a session's copy of a backward half, or of a whole step.
        sites: the site of each PythonOpGrad node, by node name.

    Returns:
        Chains whose members are named by their PythonOpGrad nodes, in the order of forward.
    """
    readers = Counter(values_read(graph))
    rows: list[list[tuple[onnx.NodeProto, int]]] = []
    for node in graph.node:
        if node.op_type != "PythonOpGrad":
            continue
        link = _gradient_link(rows[-1][-1][0], node, sites, readers) if rows else -1
        if link < 0:
            rows.append([])
        else:
            # The previous node, which runs later in forward, reads the output of this one.
            rows[-1][-1] = rows[-1][-1][0], link
        rows[-1].append((node, -1))
    chains = []
    new: dict[int, onnx.NodeProto | None] = {}
    for row in rows:
        if len(row) > 1:
            nodes, links = zip(*reversed(row), strict=True)
            chain = Chain(tuple(node.name for node in nodes), links)
            chains.append(chain)
            new.update({id(node): None for node in nodes})
            new[id(row[0][0])] = _joined_gradients(chain, nodes, sites)
    if chains:
        _put(graph, [new.get(id(node), node) for node in graph.node])
    return chains


def _gradient_link(
    later: onnx.NodeProto, earlier: onnx.NodeProto, sites: Mapping[str, Site], readers: Mapping[str, int]
) -> int:
    """Return the argument of the later call whose gradient alone the earlier one reads; -1 for none."""
    site, taken = sites[later.name], list(earlier.input)
    one_output = len(sites[earlier.name].known_result.tensors) == 1
    plain = not any(_writes(sites[node.name]) for node in (later, earlier))
    made = list(later.output[1:])
    if not (one_output and plain and len(taken) == 1 and taken[0] in made and readers[taken[0]] == 1):
        return -1
    return needed_inputs(site)[made.index(taken[0])]


def _writes(site: Site) -> bool:
    """Return True if a call writes to an argument, or is declared to share the memory of one."""
    result = site.known_result
    return bool(result.mutated or result.forward_map or result.backward_map)


def _joined_gradients(
    chain: Chain, nodes: Sequence[onnx.NodeProto], sites: Mapping[str, Site]
) -> onnx.NodeProto:
    """Return one node for PythonOpGrads that are in the order of forward."""
    attributes = [_attributes(node) for node in nodes]
    linked = [
        needed_inputs(sites[node.name]).index(link) if link >= 0 else -1
        for node, link in zip(nodes, chain.links, strict=True)
    ]
    given = Chain(chain.members, tuple(linked))
    return onnx.helper.make_node(
        "PythonOpGrad",
        nodes[-1].input,
        ["", *_without_links(given, [node.output[1:] for node in nodes])],
        chain.name,
        domain="com.microsoft",
        gradients=attributes[-1]["gradients"],
        output_tensor_types=_without_links(given, [a["output_tensor_types"] for a in attributes]),
        output_tensor_ranks=_without_links(given, [a["output_tensor_ranks"] for a in attributes]),
    )


def _put(graph: onnx.GraphProto, given: Iterable[onnx.NodeProto | None]) -> None:
    """Replace the graph's nodes, and drop the types of values that no longer exist."""
    nodes = [node for node in given if node is not None]
    values = {name for node in nodes for name in (*node.input, *node.output)}
    types = [value for value in graph.value_info if value.name in values]
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)
    graph.value_info.extend(types)


def _without_links(chain: Chain, of_members: Iterable[Iterable[Any]]) -> list[Any]:
    """Concatenate the members' items, one per tensor argument, without those of arguments that are links."""
    return [
        item
        for items, link in zip(of_members, chain.links, strict=True)
        for i, item in enumerate(items)
        if i != link
    ]


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
