"""The gradient graph that onnxruntime-training builds, in a form that another process can use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import onnx
import onnx_ir as ir

from torch2ort.cache.store.shelf import Kept, Shelf
from torch2ort.engines.held_memory import SIZES, arguments_at, outputs_read_in_backward, protect_memory
from torch2ort.engines.ort_training.recompute import recompute_activations
from torch2ort.engines.ort_training.stop_gradient import lower_stop_gradients
from torch2ort.engines.ort_training.user_gradients import hide_operators, restore_operators
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.graph.graph import Graph
from torch2ort.graph.nodes import ancestors
from torch2ort.runtime import training_pybind
from torch2ort.runtime.binding import bind_nodes
from torch2ort.runtime.centering import center_normalizations
from torch2ort.runtime.chains import Chain, join_python_ops
from torch2ort.runtime.inplace import InplacePlan, plan_inplace
from torch2ort.runtime.optimized import MODEL_FILE, optimize


@dataclass(frozen=True)
class GradientGraph:
    """A graph's forward and backward halves, and what a session must know of them.

    Nothing in it belongs to a process: PythonOp nodes call their Function by the name of their node in the
    exported graph, or a chain of them by the chain's.

    Attributes:
        model: ONNX.
        optimized: whether ONNX Runtime's optimisers have run.
        feeds: names of the inputs, in order.
        fetched: number of outputs of the forward half.
        gradients: names of the outputs of the backward half.
        gradient_of: feed -> position among :attr:`gradients`.
        needed: positions among the exported graph's feeds that the backward half reads.
        read_outputs: positions of the fetched outputs that the backward half reads.
        skipped: positions of the outputs that take no gradient.
        inplace: PythonOp node -> the in-place maps in force for it, see :attr:`plans`.
        joined: PythonOp nodes that one node stands for, see :attr:`chains`.
    """

    model: bytes
    optimized: bool
    feeds: tuple[str, ...]
    fetched: int
    gradients: tuple[str, ...]
    gradient_of: Mapping[str, int]
    needed: tuple[int, ...]
    read_outputs: tuple[int, ...]
    skipped: tuple[int, ...]
    inplace: Mapping[str, Any]
    joined: tuple[Any, ...]

    @property
    def plans(self) -> dict[str, InplacePlan]:
        """The in-place maps of each PythonOp node that has some."""
        return {name: InplacePlan.of(data) for name, data in self.inplace.items()}

    @property
    def chains(self) -> list[Chain]:
        """The chains that nodes of the graph call."""
        return [Chain.of(data) for data in self.joined]

    def description(self) -> dict[str, Any]:
        """All but the model, as JSON can hold it."""
        return {name: value for name, value in asdict(self).items() if name != "model"}

    @classmethod
    def of(cls, model: bytes, description: Mapping[str, Any]) -> GradientGraph:
        """What :meth:`description` described."""
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in description.items()}
        return cls(model=model, **fields)


def build_gradient_graph(graph: Graph, requires_grad: frozenset[str]) -> GradientGraph:
    """Let onnxruntime-training differentiate a graph.

    Args:
        graph: the exported graph.
        requires_grad: the graph inputs (model inputs and weights) that require gradients.

    Raises:
        UnsupportedOperatorError: it has no gradient for an operator.
    """
    proto = _session_graph(graph)
    hidden = hide_operators(proto)
    ort = training_pybind()
    builder = ort.OrtModuleGraphBuilder()
    try:
        builder.initialize(proto.SerializeToString(), _configuration(graph, requires_grad))
        transformers = ort.TrainingGraphTransformerConfiguration()
        transformers.propagate_cast_ops_config = ort.PropagateCastOpsConfiguration()
        # Its rewrites returned logits of a wrong shape on 1.19.2.
        transformers.enable_compute_optimizer = False
        builder.build(transformers)
    except Exception as error:
        raise no_gradient(error) from error
    info = builder.get_graph_info()
    model = onnx.load_from_string(builder.get_gradient_model())
    restore_operators(model.graph, hidden)
    needed = _read_in_backward(model.graph, graph)
    unneeded = {name for i, name in enumerate(graph.feeds) if i not in needed}
    recompute_activations(model.graph, graph.sites, unneeded, _COMPUTED_ONCE)
    gradients = tuple(output.name for output in model.graph.output)
    plans = plan_inplace(model.graph, graph.sites, graph.fetches)
    _restore_output_types(model.graph, proto.graph)
    protect_memory(model.graph, graph, plans)
    _allow_empty_tensors(model.graph)
    gradient_of = dict(
        zip(info.initializer_names_to_train, info.initializer_grad_names_to_train, strict=True)
    )
    gradient_of.update(info.user_input_grad_names)
    read = outputs_read_in_backward(model.graph, graph, plans)
    chains = join_python_ops(model.graph, graph.sites)
    return GradientGraph(
        model=model.SerializeToString(),
        optimized=False,
        feeds=tuple(value.name for value in model.graph.input),
        fetched=len(info.user_output_names) + len(info.frontier_node_arg_map),
        gradients=gradients,
        gradient_of={name: gradients.index(g) for name, g in gradient_of.items() if g in gradients},
        needed=needed,
        read_outputs=read,
        skipped=tuple(info.output_grad_indices_non_differentiable),
        inplace={name: plan.description() for name, plan in plans.items()},
        joined=tuple(chain.description() for chain in chains),
    )


def kept_gradient_graph(
    graph: Graph,
    requires_grad: frozenset[str],
    settings: Any,
    identity: Mapping[str, str],
    shelf: Shelf,
) -> GradientGraph:
    """The gradient graph out of the cache, or built, optimised and put there.

    Args:
        graph: the exported graph.
        requires_grad: the graph inputs that require gradients.
        settings: of the session that optimises it; may be changed.
        identity: engine, machine and settings, on which the optimised graph depends.
        shelf: the graph's place in the cache.

    Raises:
        UnsupportedOperatorError: onnxruntime-training has no gradient for an operator.
    """

    def make() -> Kept:
        gradient = build_gradient_graph(graph, requires_grad)
        model = optimize(gradient.model, settings)
        if model is not None:
            gradient = replace(gradient, model=model, optimized=True)
        return Kept(gradient.description(), {MODEL_FILE: gradient.model})

    kept = shelf.obtain(
        "gradient graph", {**identity, "requires_grad": json.dumps(sorted(requires_grad))}, make
    )
    return GradientGraph.of(kept.files[MODEL_FILE], kept.data)


def no_gradient(error: Exception) -> UnsupportedOperatorError:
    """The error that says that a model has no gradient graph, and what to do."""
    return UnsupportedOperatorError(
        f"onnxruntime-training cannot build this model's gradient graph: {error}. "
        f"Put the operator into a torch.autograd.Function, which keeps PyTorch's kernel"
    )


def _session_graph(graph: Graph) -> onnx.ModelProto:
    model = ir.from_proto(graph.proto)
    lower_stop_gradients(model)
    proto = center_normalizations(ir.to_proto(model))
    bind_nodes(proto.graph, graph.sites, training=True)
    return proto


def _configuration(graph: Graph, requires_grad: frozenset[str]) -> Any:
    ort = training_pybind()
    configuration = ort.OrtModuleGraphBuilderConfiguration()
    configuration.initializer_names = list(graph.weights)
    configuration.initializer_names_to_train = [n for n in graph.weights if n in requires_grad]
    configuration.input_names_require_grad = [n for n in graph.inputs if n in requires_grad]
    configuration.build_gradient_graph = True
    configuration.enable_caching = False
    configuration.loglevel = ort.Severity.ERROR
    configuration.use_memory_efficient_gradient = False
    return configuration


def _restore_output_types(gradient: onnx.GraphProto, graph: onnx.GraphProto) -> None:
    """The model's outputs lose their type in the gradient graph, and the session asks for it."""
    known = {value.name for value in gradient.value_info}
    gradient.value_info.extend(output for output in graph.output if output.name not in known)


def _allow_empty_tensors(gradient: onnx.GraphProto) -> None:
    """Let a size of 0 mean 0 where a tensor gets another one's shape, not "the size that it has"."""
    shapes = {name for node in gradient.node if node.op_type == "Shape" for name in node.output}
    for node in gradient.node:
        # The builder also writes constant shapes, in which it uses 0 in the other sense.
        if node.op_type == "Reshape" and node.input[1] in shapes:
            kept = [a for a in node.attribute if a.name != "allowzero"]
            del node.attribute[:]
            node.attribute.extend([*kept, onnx.helper.make_attribute("allowzero", 1)])


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
