"""PythonOps that follow each other directly, as one node.

What ONNX Runtime does around a call (finding the node, wrapping its tensors, locking its table of contexts)
takes as long as a small Function itself. Functions of which each takes the only output of the one before
need none of it in between: a chain of them is one PythonOp, and its gradient one PythonOpGrad.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from torch2ort.graph.nodes import function_of, values_read
from torch2ort.pythonop import Site
from torch2ort.pythonop.differentiable import needed_inputs


@dataclass(frozen=True, slots=True)
class Chain:
    """Calls that one node makes.

    Attributes:
        members: names of the PythonOp nodes that it stands for, in order.
        links: per member the index of the tensor argument that is the output of the member before; -1 for
            the first.
    """

    members: tuple[str, ...]
    links: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of the chain's node."""
        return f"{self.members[0]}..{self.members[-1]}"

    def description(self) -> list[Any]:
        """The chain as JSON can hold it."""
        return [list(self.members), list(self.links)]

    @classmethod
    def of(cls, description: Sequence[Sequence[Any]]) -> Chain:
        """What :meth:`description` described."""
        members, links = description
        return cls(tuple(members), tuple(links))


def join_python_ops(graph: onnx.GraphProto, sites: Mapping[str, Site]) -> list[Chain]:
    """Make one node of PythonOps that follow each other directly, in place.

    A chain runs where its last member stood, so that no other PythonOp may stand in between: random numbers
    are drawn in the program's order.

    Args:
        graph: a session's copy of an exported graph, with or without its backward half; the ``func_name`` of
            its nodes is the name that the PythonOp node has in the exported graph.
        sites: the site of each of them.
    """
    calls = _Calls(graph, sites)
    chains: list[list[tuple[str, int]]] = []
    for name in calls.forward:
        link = calls.link(chains[-1][-1][0], name) if chains else -1
        if link < 0:
            chains.append([])
        chains[-1].append((name, link))
    joined = [Chain(*zip(*members, strict=True)) for members in chains if len(members) > 1]
    if joined:
        _replace(graph, calls, joined)
    return joined


def join_python_op_grads(graph: onnx.GraphProto, sites: Mapping[str, Site]) -> list[Chain]:
    """The same for a graph that has the backward half alone, in which only PythonOpGrads follow each other.

    Calls that an operator stands between in forward are joined, too, if autograd hands the gradient on as it
    is. No other PythonOpGrad may stand in between: what backwards leave beside gradients, and numbers that
    they draw, come in the program's order. A chain runs where its first node stood, as nodes between may read
    a gradient that is not passed on.

    Args:
        graph: a session's copy of a backward half.
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
            # It is the node before, which runs later in forward, that takes the output of this one.
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
    """Index of the argument of the later call whose gradient is all that the earlier takes; -1 if none is."""
    site, taken = sites[later.name], list(earlier.input)
    one_output = len(sites[earlier.name].known_result.tensors) == 1
    plain = not any(_writes(sites[node.name]) for node in (later, earlier))
    made = list(later.output[1:])
    if not (one_output and plain and len(taken) == 1 and taken[0] in made and readers[taken[0]] == 1):
        return -1
    return needed_inputs(site)[made.index(taken[0])]


def _writes(site: Site) -> bool:
    """Whether a call writes to an argument, or is declared to give or to take over memory of one."""
    result = site.known_result
    return bool(result.mutated or result.forward_map or result.backward_map)


def _joined_gradients(
    chain: Chain, nodes: Sequence[onnx.NodeProto], sites: Mapping[str, Site]
) -> onnx.NodeProto:
    """One node of PythonOpGrads that are in the order of forward."""
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


class _Calls:
    """PythonOp and PythonOpGrad nodes of a graph, by the name of the exported graph's node."""

    def __init__(self, graph: onnx.GraphProto, sites: Mapping[str, Site]) -> None:
        self._sites = sites
        self.nodes = list(graph.node)
        self.forward = {n.name: n for n in self.nodes if n.op_type == "PythonOp" and n.name in sites}
        self.backward = {function_of(n): n for n in self.nodes if n.op_type == "PythonOpGrad"}
        self._readers = Counter(values_read(graph))

    def link(self, first: str, second: str) -> int:
        """Index of the input by which the second call may directly follow the first; -1 if it may not."""
        made, taken = self.forward[first].output, self.forward[second].input
        # The first output is the context.
        if not (self._plain(first) and self._plain(second)) or len(made) != 2 or self._readers[made[1]] != 1:
            return -1
        link = list(taken).index(made[1]) if made[1] in taken else -1
        return link if link >= 0 and self._linked_backward(first, second, link) else -1

    def _plain(self, name: str) -> bool:
        """Whether a call takes tensors, writes to none, and returns no memory of theirs."""
        nodes = [node for node in (self.forward[name], self.backward.get(name)) if node is not None]
        mapped = any(attribute.name == "tensor_reuse_map" for node in nodes for attribute in node.attribute)
        return len(nodes[0].input) > 0 and not mapped and not self._sites[name].known_result.mutated

    def _linked_backward(self, first: str, second: str, link: int) -> bool:
        """Whether the second's gradient for that input is all that the first's backward takes."""
        before, after = self.backward.get(first), self.backward.get(second)
        if before is None or after is None:
            return before is after
        gradient = after.output[link] if link < len(after.output) else ""
        return gradient != "" and list(before.input[1:]) == [gradient] and self._readers[gradient] == 1


def _replace(graph: onnx.GraphProto, calls: _Calls, chains: Iterable[Chain]) -> None:
    """Put each chain where its members' last nodes stand; their gradients wait for nothing else."""
    new: dict[int, onnx.NodeProto | None] = {}  # by the id of the node that it stands for
    for chain in chains:
        forward = [calls.forward[name] for name in chain.members]
        backward = [calls.backward[name] for name in chain.members if name in calls.backward]
        new.update({id(node): None for node in (*forward, *backward)})
        new[id(forward[-1])] = _joined_forward(chain, forward)
        if backward:
            new[id(backward[-1])] = _joined_backward(chain, forward, backward)
    _put(graph, [new.get(id(node), node) for node in calls.nodes])


def _put(graph: onnx.GraphProto, given: Iterable[onnx.NodeProto | None]) -> None:
    """Give the graph other nodes, and drop what it says of values that are no more."""
    nodes = [node for node in given if node is not None]
    values = {name for node in nodes for name in (*node.input, *node.output)}
    types = [value for value in graph.value_info if value.name in values]
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)
    graph.value_info.extend(types)


def _joined_forward(chain: Chain, nodes: Sequence[onnx.NodeProto]) -> onnx.NodeProto:
    attributes = [_attributes(node) for node in nodes]
    of_inputs = {
        name: _without_links(chain, [given[name] for given in attributes])
        for name in ("input_tensor_types", "input_tensor_ranks", "input_requires_grads")
    }
    inputs = _without_links(chain, [node.input for node in nodes])
    return onnx.helper.make_node(
        "PythonOp",
        inputs,
        [nodes[0].output[0], *nodes[-1].output[1:]],
        chain.name,
        domain="com.microsoft",
        **{
            **attributes[-1],
            **of_inputs,
            "func_name": chain.name,
            "input_convention": "d" * len(inputs),
            "comment": _comment(attributes),
        },
    )


def _joined_backward(
    chain: Chain, forward: Sequence[onnx.NodeProto], nodes: Sequence[onnx.NodeProto]
) -> onnx.NodeProto:
    attributes = [_attributes(node) for node in nodes]
    of_outputs = {
        name: _without_links(chain, [given[name] for given in attributes])
        for name in ("output_tensor_types", "output_tensor_ranks", "output_tensor_requires_grads")
    }
    outputs = [
        [*n.output, *[""] * (len(f.input) - len(n.output))] for f, n in zip(forward, nodes, strict=True)
    ]
    made = _without_links(chain, outputs)
    return onnx.helper.make_node(
        "PythonOpGrad",
        [nodes[0].input[0], *nodes[-1].input[1:]],
        made,
        f"{chain.name}_Grad",
        domain="com.microsoft",
        **{
            **attributes[-1],
            **of_outputs,
            "func_name": chain.name,
            "output_convention": "d" * len(made),
            "comment": _comment(attributes),
        },
    )


def _without_links(chain: Chain, of_members: Iterable[Iterable[Any]]) -> list[Any]:
    """What the members have one of a tensor argument, in a row, but for the arguments that are links."""
    return [
        item
        for items, link in zip(of_members, chain.links, strict=True)
        for i, item in enumerate(items)
        if i != link
    ]


def _comment(attributes: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(given["comment"].decode() for given in attributes)


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
