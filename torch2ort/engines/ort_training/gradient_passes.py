"""The passes over a gradient graph that onnxruntime-training built, in their order.

The order is the correctness, so each pass says what must be true before it and what is true after it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import onnx

from torch2ort.engines.held_memory import arguments_at, outputs_read_in_backward, protect_memory
from torch2ort.engines.ort_training.recompute import recompute_activations
from torch2ort.engines.ort_training.user_gradients import restore_operators
from torch2ort.graph.graph import Graph
from torch2ort.graph.nodes import ancestors
from torch2ort.graph.operator_memory import SIZES
from torch2ort.runtime.chains import Chain, join_python_ops
from torch2ort.runtime.inplace import InplacePlan, plan_inplace


class Fact(enum.Enum):
    """What may be true of a gradient graph, or known about it."""

    OWN_OPERATORS = "no node is a stand-in for one with a registered gradient"
    FEEDS_READ = "which feeds the backward half reads is known"
    OWN_COPIES = "the backward half reads its own copy of what is cheap to compute"
    GRADIENTS = "the names of the gradients are known"
    MAPS = "the in-place maps are chosen, and stand in the nodes"
    OUTPUT_TYPES = "the model's outputs have their types"
    PROTECTED = "what somebody outside holds is an output of the graph"
    EMPTY_TENSORS = "a size of 0 out of another tensor's shape means 0"
    OUTPUTS_READ = "which of the model's outputs the backward half reads is known"
    JOINED = "PythonOps that follow each other directly are one node"


@dataclass
class Work:
    """A gradient graph on its way through the passes.

    Attributes:
        gradient: forward and backward half, changed in place.
        graph: the exported graph.
        differentiated: the graph that the builder was given.
        hidden: nodes with a registered gradient, by their stand-in's operator.
        needed: positions of the feeds that the backward half reads.
        copies: inputs that are fed with copies -> the feed that each is one of.
        gradients: names of the outputs of the backward half.
        plans: the in-place maps in force, by PythonOp node.
        read_outputs: positions of the fetched outputs that the backward half reads.
        chains: PythonOps that one node stands for.
    """

    gradient: onnx.GraphProto
    graph: Graph
    differentiated: onnx.GraphProto
    hidden: Mapping[str, onnx.NodeProto]
    needed: tuple[int, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    gradients: tuple[str, ...] = ()
    plans: Mapping[str, InplacePlan] = field(default_factory=dict)
    read_outputs: tuple[int, ...] = ()
    chains: list[Chain] = field(default_factory=list)


@dataclass(frozen=True)
class Pass:
    """One step.

    Attributes:
        run: does it.
        requires: what must be true before.
        ensures: what is true after, and stays so.
    """

    run: Callable[[Work], None]
    requires: frozenset[Fact]
    ensures: Fact


def in_order(passes: Iterable[Pass]) -> tuple[Pass, ...]:
    """``passes``, each of which finds what it requires.

    Raises:
        ValueError: one of them comes too early; names it.
    """
    checked = tuple(passes)
    true: set[Fact] = set()
    for one in checked:
        missing = sorted(fact.value for fact in one.requires - true)
        if missing:
            raise ValueError(f"{one.run.__name__} comes too early: it requires that {missing[0]}")
        true.add(one.ensures)
    return checked


def run_passes(work: Work) -> None:
    """Make of the builder's graph what a session runs, in place."""
    for one in PASSES:
        one.run(work)


def _restore_operators(work: Work) -> None:
    restore_operators(work.gradient, work.hidden)


def _find_feeds_read(work: Work) -> None:
    work.needed = _read_in_backward(work.gradient, work.graph)


def _recompute(work: Work) -> None:
    unneeded = {name for i, name in enumerate(work.graph.feeds) if i not in work.needed}
    work.copies = recompute_activations(
        work.gradient, work.graph.sites, unneeded, _COMPUTED_ONCE, work.graph.weights.keys()
    )


def _note_gradients(work: Work) -> None:
    work.gradients = tuple(output.name for output in work.gradient.output)


def _plan_inplace(work: Work) -> None:
    work.plans = plan_inplace(work.gradient, work.graph.sites, work.graph.fetches)


def _restore_output_types(work: Work) -> None:
    """The model's outputs lose their type in the gradient graph, and the session asks for it."""
    known = {value.name for value in work.gradient.value_info}
    outputs = work.differentiated.output
    work.gradient.value_info.extend(output for output in outputs if output.name not in known)


def _protect_memory(work: Work) -> None:
    protect_memory(work.gradient, work.graph, work.plans)


def _allow_empty_tensors(work: Work) -> None:
    """Let a size of 0 mean 0 where a tensor gets another one's shape, not "the size that it has"."""
    shapes = {name for node in work.gradient.node if node.op_type == "Shape" for name in node.output}
    for node in work.gradient.node:
        # The builder also writes constant shapes, in which it uses 0 in the other sense.
        if node.op_type == "Reshape" and node.input[1] in shapes:
            kept = [a for a in node.attribute if a.name != "allowzero"]
            del node.attribute[:]
            node.attribute.extend([*kept, onnx.helper.make_attribute("allowzero", 1)])


def _find_outputs_read(work: Work) -> None:
    work.read_outputs = outputs_read_in_backward(work.gradient, work.graph, work.plans)


def _join_python_ops(work: Work) -> None:
    work.chains = join_python_ops(work.gradient, work.graph.sites)


# Values that are computed once: no fusion of ONNX Runtime's gives backward their inputs instead.
_COMPUTED_ONCE = frozenset(
    {
        "BatchNormInternal", "BatchNormalization", "Conv", "ConvTranspose", "Einsum", "FusedMatMul",
        "Gather", "GatherElements", "GatherND", "Gemm", "LayerNormalization", "LogSoftmax", "MatMul",
        "MaxPool", "PythonOp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "ScatterElements",
        "ScatterND", "SimplifiedLayerNormalization", "Softmax", "TopK",
    }
)  # fmt: skip


def _read_in_backward(gradient: onnx.GraphProto, graph: Graph) -> tuple[int, ...]:
    """Positions of the feeds that backward reads, or may once graphs are fused.

    It does so in a node that the model's outputs do not need, or in a Function that kept its argument.
    """
    outputs = [name for node in gradient.node if node.op_type == "YieldOp" for name in node.input]
    forward = ancestors(gradient, outputs)
    read: set[str] = set()
    for node in gradient.node:
        # In the session's order, all that the outputs do not need runs behind them.
        if node.op_type not in SIZES | {"YieldOp"} and forward.isdisjoint(node.output):
            read.update(node.input)
        site = graph.sites.get(node.name)
        if site is not None and node.op_type == "PythonOp":
            read.update(arguments_at(node, site, site.known_result.kept))
    # What YieldOp gives comes from outside.
    computed_from = ancestors(gradient, read, stop=_COMPUTED_ONCE | SIZES | {"YieldOp"})
    return tuple(i for i, name in enumerate(graph.feeds) if name in computed_from)


PASSES = in_order(
    (
        Pass(_restore_operators, frozenset(), Fact.OWN_OPERATORS),
        Pass(_find_feeds_read, frozenset({Fact.OWN_OPERATORS}), Fact.FEEDS_READ),
        # No copy may read what can change before backward.
        Pass(_recompute, frozenset({Fact.FEEDS_READ}), Fact.OWN_COPIES),
        Pass(_note_gradients, frozenset(), Fact.GRADIENTS),
        # A copy is one more reader, and a Function writes over nothing that has another.
        Pass(_plan_inplace, frozenset({Fact.OWN_COPIES}), Fact.MAPS),
        Pass(_restore_output_types, frozenset(), Fact.OUTPUT_TYPES),
        # It adds outputs, which are no gradients.
        Pass(_protect_memory, frozenset({Fact.GRADIENTS, Fact.MAPS, Fact.OUTPUT_TYPES}), Fact.PROTECTED),
        Pass(_allow_empty_tensors, frozenset({Fact.OWN_COPIES}), Fact.EMPTY_TENSORS),
        Pass(_find_outputs_read, frozenset({Fact.MAPS}), Fact.OUTPUTS_READ),
        # Behind it there are no nodes any more by which a site's arguments are found.
        Pass(_join_python_ops, frozenset({Fact.PROTECTED, Fact.OUTPUTS_READ}), Fact.JOINED),
    )
)
