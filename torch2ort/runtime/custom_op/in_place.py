"""In-place maps in a graph whose Functions run in the custom operator.

onnxruntime plans the memory of each value, so it has to know of each map. A Function that writes to an
argument gets the output of an ``Owned`` node: the argument's memory if nothing else reads it any more, else a
copy. An output in an argument's memory is passed on by an ``Aliased`` node: the same memory, which
onnxruntime keeps for both values, or a copy for an output of the graph. onnxruntime decides this after its
optimisation of the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from torch2ort.graph.graph_traversal import graphs_in, values_read
from torch2ort.providers import CPU, name_of
from torch2ort.pythonop import ONNX_TYPES, TENSOR, Site
from torch2ort.pythonop.site import TensorType, needed_inputs

# Kind ("forward" or "backward"), key and value of an entry of an in-place map.
Pair = tuple[str, int, int]

_DOMAIN = "com.microsoft"
# Operators whose result is in their first input's memory.
_PASS_ON = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})


def follows_maps(providers: Sequence[object] | None) -> bool:
    """Return True if in-place maps work on these providers; only the CPU's has kernels of both nodes."""
    return all(name_of(provider) == CPU for provider in providers or ())


@dataclass(frozen=True, slots=True)
class InplacePlan:
    """The maps in force at a site in one session.

    Attributes:
        forward: output position -> argument position.
        backward: argument position -> output position.
    """

    forward: Mapping[int, int] = field(default_factory=dict)
    backward: Mapping[int, int] = field(default_factory=dict)


def views_only(site: Site) -> InplacePlan:
    """Return the plan for a session whose graph was not prepared: no argument is written to."""
    return InplacePlan(site.known_result.views)


def plan_of(site: Site, *, in_place: bool) -> InplacePlan:
    """Return the maps in force at a site.

    Args:
        site: the call.
        in_place: whether :func:`share_memory` prepares the graph.
    """
    result = site.known_result
    return InplacePlan(dict(result.forward_map), dict(result.backward_map)) if in_place else views_only(site)


@dataclass(frozen=True)
class _Mapped:
    """An entry of a map at one node.

    Attributes:
        pair: the entry as it is declared.
        output: position among the node's outputs; 0 for an output that is unused.
        input: position among the node's inputs.
        made, given: types of the output and of the input.
        written: whether the Function may write to the input.
    """

    pair: Pair
    output: int
    input: int
    made: TensorType
    given: TensorType
    written: bool


def share_memory(graph: onnx.GraphProto, sites: Mapping[str, Site]) -> dict[str, set[Pair]]:
    """Insert the nodes that declared maps need, in place.

    Args:
        graph: a session's copy of a graph.
        sites: the site of each PythonOp and PythonOpGrad node, by node name.

    Returns:
        The entries that would save a copy, as far as the graph shows it before onnxruntime optimises it: by
        node name, for nodes of users' Functions.
    """
    saved = _savings(graph, sites)
    declared = {
        name: site
        for name, site in sites.items()
        if site.known_result.forward_map or site.known_result.backward_map
    }
    for part in graphs_in(graph) if declared else ():
        nodes = [new for node in part.node for new in _surrounded(node, declared.get(node.name))]
        _name_sizes(part, [node for node in nodes if node.op_type == "Owned"])
        del part.node[:]
        part.node.extend(nodes)
    return saved


def _savings(graph: onnx.GraphProto, sites: Mapping[str, Site]) -> dict[str, set[Pair]]:
    found: dict[str, set[Pair]] = {}
    users = {name: site for name, site in sites.items() if not site.internal}
    for part in graphs_in(graph) if users else ():
        memory = _Memory(part, users)
        for node in part.node:
            if node.name in users:
                pairs, declared = _pairs(node, users[node.name]), _declared(users[node.name])
                # One value must not share memory with two others.
                taken = {(kind, value) for kind, _, value in declared}
                found[node.name] = {
                    one.pair
                    for one in pairs
                    if memory.saves(node, one) and (one.pair[0], one.pair[2]) not in taken
                }
    return found


def _surrounded(node: onnx.NodeProto, site: Site | None) -> Iterator[onnx.NodeProto]:
    """Yield the node together with the nodes that its maps need."""
    pairs = [] if site is None else [one for one in _pairs(node, site) if one.pair in _declared(site)]
    for one in pairs:
        if one.written:
            given = node.input[one.input]
            node.input[one.input] = f"{given}_of_{node.name}_{one.input}"
            yield _node("Owned", [given], node.input[one.input], one.given)
    yield node
    handed_on = [one for one in pairs if one.output and one.made.dtype == one.given.dtype]
    for one in handed_on:
        made = node.output[one.output]
        node.output[one.output] = f"{made}_sizes"
        yield _node("Aliased", [node.input[one.input], node.output[one.output]], made, one.made)
    if handed_on:
        _give_sizes(node, [one.output for one in handed_on])


def _declared(site: Site) -> set[Pair]:
    result = site.known_result
    forward: list[Pair] = [("forward", *pair) for pair in result.forward_map]
    return {*forward, *(("backward", *pair) for pair in result.backward_map)}


def _pairs(node: onnx.NodeProto, site: Site) -> list[_Mapped]:
    """Return every entry that a map could have at a node, for inputs that the node has."""
    return _backward_pairs(node, site) if node.op_type == "PythonOpGrad" else _forward_pairs(node, site)


def _forward_pairs(node: onnx.NodeProto, site: Site) -> list[_Mapped]:
    result = site.known_result
    outputs = [i for i, value in enumerate(result.outputs) if value is TENSOR]
    return [
        _Mapped(("forward", o, a), _present(node, 1 + k), i, result.tensors[k], given, a in result.mutated)
        for k, o in enumerate(outputs)
        for i, (a, given) in enumerate(zip(site.tensor_positions, result.inputs, strict=True))
    ]


def _backward_pairs(node: onnx.NodeProto, site: Site) -> list[_Mapped]:
    # The positions of the gradients that the node reads and computes, among the tensors of each kind.
    (arriving,) = (list(a.ints) for a in node.attribute if a.name == "gradients")
    needed, result = needed_inputs(site), site.known_result
    outputs = [i for i, value in enumerate(result.outputs) if value is TENSOR]
    return [
        # It is unknown whether backward writes to a gradient.
        _Mapped(("backward", a, outputs[k]), made, i, result.inputs[j], result.tensors[k], written=True)
        for j, a in enumerate(site.tensor_positions)
        for made in [_present(node, 1 + needed.index(j)) if j in needed else 0]
        for i, k in enumerate(arriving)
        if k < len(outputs)
    ]


def _present(node: onnx.NodeProto, output: int) -> int:
    """Return the position, or 0 if the output is unused."""
    return output if output < len(node.output) and node.output[output] else 0


def _node(operator: str, inputs: Sequence[str], output: str, kind: TensorType) -> onnx.NodeProto:
    return onnx.helper.make_node(
        operator,
        inputs,
        [output],
        f"{operator}_{output}",
        domain=_DOMAIN,
        output_tensor_types=[ONNX_TYPES[kind.dtype]],
        output_tensor_ranks=[kind.rank],
    )


def _give_sizes(node: onnx.NodeProto, outputs: Sequence[int]) -> None:
    """Make outputs contain the sizes of values that are in an input's memory."""
    for attribute in node.attribute:
        for name, value in (("output_tensor_types", onnx.TensorProto.INT64), ("output_tensor_ranks", 1)):
            for output in outputs if attribute.name == name else ():
                attribute.ints[output - 1] = value
    node.attribute.append(onnx.helper.make_attribute("handed_on", sorted(outputs)))


def _name_sizes(graph: onnx.GraphProto, owned: Sequence[onnx.NodeProto]) -> None:
    """Name the sizes of the inputs of Owned nodes: onnxruntime reuses only memory of a known size."""
    known = {value.name: value for value in (*graph.input, *graph.output, *graph.value_info)}
    for node in owned:
        name = node.input[0]
        kind, rank = (a.ints[0] for a in node.attribute)
        if name not in known:
            sizes = [None] * rank
            known[name] = graph.value_info.add()
            known[name].CopyFrom(onnx.helper.make_tensor_value_info(name, kind, sizes))
        for i, size in enumerate(known[name].type.tensor_type.shape.dim):
            if not (size.dim_param or size.HasField("dim_value")):
                size.dim_param = f"{name}_size_{i}"


class _Memory:
    """The uses of each value of a graph.

    Args:
        graph: the graph.
        sites: the sites of users' Functions, by node name.
    """

    def __init__(self, graph: onnx.GraphProto, sites: Mapping[str, Site]) -> None:
        self._sites = sites
        self._leaving = {value.name for value in graph.output}
        self._producers = {name: node for node in graph.node for name in node.output if name}
        self._readers = Counter(values_read(graph))
        # Values that do not depend on inputs may become constants, which are kept for all runs.
        self._varying = {value.name for value in graph.input}
        for node in graph.node:
            if not self._varying.isdisjoint(node.input):
                self._varying.update(node.output)

    def saves(self, node: onnx.NodeProto, mapped: _Mapped) -> bool:
        """Return True if such an entry of a map would save a copy."""
        stays = mapped.output > 0 and node.output[mapped.output] not in self._leaving
        free = not mapped.written or self._is_given_away(node.input[mapped.input])
        return stays and free and mapped.made.dtype == mapped.given.dtype

    def _is_given_away(self, name: str) -> bool:
        """Return True if the only node that reads ``name`` is the last to read its memory."""
        while (node := self._producers.get(name)) is not None and self._readers[name] == 1:
            if name not in self._varying:
                return False
            source = self._source(node, name)
            if source is None:
                return True
            name = source
        return False

    def _source(self, node: onnx.NodeProto, name: str) -> str | None:
        """Return the input whose memory an output shares, if other nodes may read that input."""
        if node.op_type in _PASS_ON:
            return str(node.input[0])
        for one in _pairs(node, self._sites[node.name]) if node.name in self._sites else ():
            made = one.pair in _declared(self._sites[node.name]) and one.output > 0
            if made and node.output[one.output] == name and not one.written:
                return str(node.input[one.input])
        return None
