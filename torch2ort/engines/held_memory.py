"""Memory of a gradient graph that somebody outside of it holds.

Two things could take it away. ONNX Runtime's memory planner lets operators write their result over an input
that nothing reads afterwards. And a value that was written so, or that passes on another's memory as a
Reshape's does, does not own it: whoever holds the value sees it freed with the graph's last use. A graph
output is neither written over nor freed before the run ends, so what others hold becomes a graph output,
which nobody fetches: no byte is copied. As that keeps it for the whole run, it is done only where needed.

Training sessions run without ``enable_mem_reuse``, which gives free memory to other values of the same size.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

import onnx

from torch2ort.graph.graph import Graph
from torch2ort.graph.nodes import ancestors
from torch2ort.graph.operator_memory import SIZES, memory_of
from torch2ort.kernels.functions import may_keep_results
from torch2ort.pythonop import TENSOR, Site
from torch2ort.runtime.inplace import InplacePlan, mapped_arguments


def protect_memory(gradient: onnx.GraphProto, graph: Graph, plans: Mapping[str, InplacePlan]) -> None:
    """Keep alive what others hold, in place.

    Args:
        gradient: forward and backward half.
        graph: the exported graph.
        plans: the in-place maps in force, by PythonOp node.
    """
    taken = {value.name for value in (*gradient.input, *gradient.output)}
    types = {value.name: value for value in gradient.value_info}
    safe = _safe(gradient)
    for node in gradient.node:
        for name in _held_outside(node, graph, plans):
            if name and name not in taken and name not in safe:
                taken.add(name)
                gradient.output.append(types.get(name) or onnx.helper.make_empty_tensor_value_info(name))


def _safe(gradient: onnx.GraphProto) -> set[str]:
    """Values that own their memory and that nobody writes over."""
    values = _numbered(gradient)
    written = {
        values.get(name)
        for node in gradient.node
        if not memory_of(node.op_type).only_reads
        for name in node.input
    }
    return {
        name
        for node in gradient.node
        if memory_of(node.op_type).owns or node.op_type == "PythonOp"
        for name in node.output
        if values[name] not in written
    }


def _numbered(gradient: onnx.GraphProto) -> dict[str, Hashable]:
    """Each value by what computes it: those that are equal may become one value."""
    values: dict[str, Hashable] = {value.name: value.name for value in gradient.input}
    for constant in gradient.initializer:
        values[constant.name] = (constant.data_type, *constant.dims, constant.raw_data)
    numbers: dict[Hashable, int] = {}
    for node in gradient.node:
        attributes = sorted(a.SerializeToString() for a in node.attribute)
        inputs = [values.get(name, name) for name in node.input]
        number = numbers.setdefault((node.op_type, node.domain, *attributes, *inputs), len(numbers))
        values.update({name: (number, i) for i, name in enumerate(node.output)})
    return values


def _held_outside(node: onnx.NodeProto, graph: Graph, plans: Mapping[str, InplacePlan]) -> list[str]:
    """Values at ``node`` that a Function or the caller holds, or that pass their memory on unseen."""
    if node.op_type == "YieldOp":
        return list(node.input)
    if node.op_type == "ATen":
        # A stop-gradient passes its input's memory on, which the planner does not know.
        return [*node.input, *node.output]
    site = graph.sites.get(node.name)
    if site is None or node.op_type != "PythonOp":
        return []
    held = {*site.known_result.kept, *mapped_arguments(site, plans.get(node.name, InplacePlan()))}
    results = node.output[1:] if may_keep_results(site) else []
    return [*arguments_at(node, site, held), *results]


def outputs_read_in_backward(
    gradient: onnx.GraphProto, graph: Graph, plans: Mapping[str, InplacePlan]
) -> tuple[int, ...]:
    """Positions of the fetched outputs whose memory the backward half reads, or a Function holds for it.

    Args:
        gradient: forward and backward half as they will run, chains apart.
        graph: the exported graph.
        plans: the in-place maps in force, by PythonOp node.
    """
    fetched = [name for node in gradient.node if node.op_type == "YieldOp" for name in node.input]
    forward = ancestors(gradient, fetched)
    numbers = _numbered(gradient)
    source: dict[Hashable, str] = {}
    read: set[str] = set()
    for node in gradient.node:
        # In the session's order, all that the outputs do not need runs behind them.
        if node.op_type not in SIZES | {"YieldOp"} and forward.isdisjoint(node.output):
            read.update(node.input)
        does = memory_of(node.op_type)
        if does.passes_on or does.may_vanish:
            source.update({numbers[name]: node.input[0] for name in node.output[:1]})
        site = graph.sites.get(node.name)
        if site is None or node.op_type != "PythonOp":
            continue
        plan = plans.get(node.name, InplacePlan())
        arguments = dict(zip(site.tensor_positions, node.input, strict=True))
        source.update({numbers[node.output[1 + o]]: arguments[a] for o, a in _tensor_map(site, plan)})
        if not any(site.needs_input_grad):
            continue  # autograd keeps no context of it
        read.update(arguments_at(node, site, site.known_result.kept))
        results = node.output[1:]
        held = site.known_result.kept_results
        read.update(results if held is None else (results[i] for i in held if i < len(results)))

    def memory(name: str) -> Hashable:
        """The value that owns the memory of ``name``."""
        number = numbers.get(name, name)
        return memory(source[number]) if number in source else number

    memories = {memory(name) for name in read if name}
    return tuple(i for i, name in enumerate(graph.fetches) if memory(name) in memories)


def _tensor_map(site: Site, plan: InplacePlan) -> list[tuple[int, int]]:
    """The forward map of ``plan``, from positions among the tensor outputs."""
    outputs = [i for i, value in enumerate(site.known_result.outputs) if value is TENSOR]
    return [(outputs.index(output), argument) for output, argument in plan.forward.items()]


def arguments_at(node: onnx.NodeProto, site: Site, positions: Collection[int]) -> list[str]:
    """The values that a PythonOp node has for the tensor arguments at these positions of its Function."""
    return [n for p, n in zip(site.tensor_positions, node.input, strict=True) if p in positions]
