"""In-place maps in one session's graph: those of the declared ones that are safe there.

onnxruntime's planner shares memory where a node's ``tensor_reuse_map`` says so, and its kernel insists that
the Function did. So the node and the native site must say the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import onnx

from torch2ort.graph.nodes import function_of
from torch2ort.graph.operator_memory import memory_of
from torch2ort.pythonop import TENSOR, Site

_MAP = "tensor_reuse_map"
_BACKWARD_MAP = "bw_tensor_reuse_map"


@dataclass(frozen=True, slots=True)
class InplacePlan:
    """What a site's memory is in one session.

    Attributes:
        forward: output position -> argument position.
        backward: argument position -> output position.
        overwritten: positions of the outputs over which the Function that reads them writes.
    """

    forward: Mapping[int, int] = field(default_factory=dict)
    backward: Mapping[int, int] = field(default_factory=dict)
    overwritten: tuple[int, ...] = ()

    def description(self) -> list[Any]:
        """The plan as JSON can hold it."""
        maps = [[list(pair) for pair in pairs.items()] for pairs in (self.forward, self.backward)]
        return [*maps, list(self.overwritten)]

    @classmethod
    def of(cls, description: Sequence[Any]) -> InplacePlan:
        """What :meth:`description` described."""
        forward, backward = ({key: value for key, value in pairs} for pairs in description[:2])
        return cls(forward, backward, tuple(description[2]))


def views_only(site: Site) -> InplacePlan:
    """The plan for a session whose graph nobody looked at: nothing is written to."""
    result = site.known_result
    return InplacePlan({o: a for o, a in result.forward_map if a not in result.mutated})


def plan_inplace(
    graph: onnx.GraphProto, sites: Mapping[str, Site], fetched: Collection[str]
) -> dict[str, InplacePlan]:
    """Choose the maps that are safe in ``graph``, and write them to its nodes, in place.

    A Function may only write to memory that nobody else reads, and what leaves the graph is memory of its
    own.

    Args:
        graph: a session's copy, forward only or with its gradient; PythonOp nodes have their exported names,
            and PythonOpGrad nodes these as ``func_name``.
        sites: the site of each PythonOp node, by node name.
        fetched: names of the values that are given to the user.

    Returns:
        The plan of each site that declares a map.
    """
    plans = {
        name: InplacePlan({}, {})
        for name, site in sites.items()
        if site.known_result.forward_map or site.known_result.backward_map
    }
    if not plans:
        return plans
    memory = _Memory(graph, sites, fetched)
    for node in graph.node:
        if node.op_type == "PythonOp" and node.name in plans:
            forward = _forward_plan(node, sites[node.name], memory)
            plans[node.name] = replace(plans[node.name], forward=forward)
        elif node.op_type == "PythonOpGrad" and (name := function_of(node)) in plans:
            plans[name] = replace(plans[name], backward=_backward_plan(node, sites[name], memory))
    for name, outputs in memory.overwritten.items():
        plans[name] = replace(plans.get(name, InplacePlan()), overwritten=tuple(sorted(outputs)))
    return plans


def mapped_arguments(site: Site, plan: InplacePlan) -> set[int]:
    """Arguments whose memory an output goes on being, so that nobody may write over it."""
    return set(plan.forward.values()) - set(site.known_result.mutated)


class _Memory:
    """Who reads which value of a graph.

    Attributes:
        overwritten: PythonOp node -> positions of the outputs that :meth:`may_be_written` promised.
    """

    def __init__(self, graph: onnx.GraphProto, sites: Mapping[str, Site], fetched: Collection[str]) -> None:
        self.overwritten: dict[str, set[int]] = {}
        self._sites = sites
        self.leaving = {value.name for value in graph.output} | set(fetched)
        self._given = {value.name for value in graph.input}
        self._producers = {name: node for node in graph.node for name in node.output if name}
        self._readers = Counter(name for node in graph.node for name in node.input if name)
        self._varying: dict[str, bool] = {}

    def read_once(self, name: str) -> bool:
        """Whether one node alone reads ``name``."""
        return self._readers[name] == 1 and name not in self.leaving

    def may_be_written(self, name: str) -> bool:
        """Whether nobody but the one node that reads ``name`` ever sees its memory."""
        producer = self._producers.get(name)
        if producer is None or not self.read_once(name):
            return False
        if producer.op_type == "PythonOp":
            return self._given_away(producer, name)
        if memory_of(producer.op_type).held_outside:
            return False
        if memory_of(producer.op_type).passes_on:
            return self.may_be_written(producer.input[0])
        return self._varies(name)

    def _given_away(self, producer: onnx.NodeProto, name: str) -> bool:
        """Whether a call can be told to give an output that nobody holds."""
        site = self._sites.get(producer.name)
        position = list(producer.output).index(name) - 1
        if site is None or site.internal or site.mapped or position < 0:
            return False
        outputs, result = _tensor_outputs(site), site.known_result
        # Of a mapped output others may have the memory.
        if position >= len(outputs) or any(output == outputs[position] for output, _ in result.forward_map):
            return False
        self.overwritten.setdefault(producer.name, set()).add(outputs[position])
        return True

    def _varies(self, name: str) -> bool:
        """Whether ``name`` depends on an input; else it may become a constant, which is kept for all runs."""
        if name in self._given:
            return True
        if name not in self._varying:
            producer = self._producers.get(name)
            self._varying[name] = producer is not None and any(map(self._varies, producer.input))
        return self._varying[name]


def _forward_plan(node: onnx.NodeProto, site: Site, memory: _Memory) -> dict[int, int]:
    result = site.known_result
    outputs, arguments = _tensor_outputs(site), site.tensor_positions
    plan: dict[int, int] = {}
    reuse = [-1] * len(node.output)
    for output, argument in result.forward_map:
        position = 1 + outputs.index(output)
        given, made = node.input[arguments.index(argument)], node.output[position]
        writes = argument in result.mutated
        if made and made not in memory.leaving and (not writes or memory.may_be_written(given)):
            plan[output] = argument
            reuse[position] = arguments.index(argument)
    _write(node, _MAP, reuse)
    return plan


def _backward_plan(node: onnx.NodeProto, site: Site, memory: _Memory) -> dict[int, int]:
    outputs, arguments = _tensor_outputs(site), site.tensor_positions
    plan: dict[int, int] = {}
    reuse = [-1] * len(node.output)
    for argument, output in site.known_result.backward_map:
        position, source = arguments.index(argument), 1 + outputs.index(output)
        given = node.input[source] if source < len(node.input) else ""
        made = node.output[position] if position < len(node.output) else ""
        # Whether backward writes to the gradient is not known, so that nobody else may read it.
        if given and made and made not in memory.leaving and memory.read_once(given):
            plan[argument] = output
            reuse[position] = source
    _write(node, _MAP, reuse)
    return plan


def _write(node: onnx.NodeProto, name: str, reuse: list[int]) -> None:
    kept = [a for a in node.attribute if a.name not in (name, _BACKWARD_MAP)]
    if any(position >= 0 for position in reuse):
        kept.append(onnx.helper.make_attribute(name, reuse))
    del node.attribute[:]
    node.attribute.extend(kept)


def _tensor_outputs(site: Site) -> list[int]:
    return [i for i, value in enumerate(site.known_result.outputs) if value is TENSOR]
