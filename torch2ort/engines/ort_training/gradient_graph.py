"""The gradient graph that onnxruntime-training builds, in a form that another process can use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import onnx
import onnx_ir as ir

from torch2ort.cache.store.shelf import Kept, Shelf
from torch2ort.engines.ort_training.gradient_passes import Work, run_passes
from torch2ort.engines.ort_training.stop_gradient import lower_stop_gradients
from torch2ort.engines.ort_training.user_gradients import hide_operators
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.graph.graph import Graph
from torch2ort.log import onnxruntime_severity
from torch2ort.options import Options
from torch2ort.providers import session_providers
from torch2ort.runtime import training_pybind
from torch2ort.runtime.binding import bind_nodes
from torch2ort.runtime.chains import Chain
from torch2ort.runtime.inplace import InplacePlan
from torch2ort.runtime.mended import mended
from torch2ort.runtime.optimized import MODEL_FILE, identity, optimize
from torch2ort.runtime.training_kernel.bools import cast_bools


@dataclass(frozen=True)
class GradientGraph:
    """A graph's forward and backward halves, and what a session must know of them.

    Nothing in it belongs to a process: PythonOp nodes call their Function by the name of their node in the
    exported graph, or a chain of them by the chain's.

    Attributes:
        model: ONNX.
        optimized: whether ONNX Runtime's optimisers have run.
        feeds: names of the inputs, in order.
        copies: those that are fed with copies -> the feed that each is one of.
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
    copies: Mapping[str, str]
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

    @property
    def sources(self) -> list[tuple[str, bool]]:
        """Of each input, the feed that it gets, and whether it gets a copy of that."""
        return [(self.copies.get(name, name), name in self.copies) for name in self.feeds]

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
    work = Work(model.graph, graph, proto.graph, hidden)
    run_passes(work)
    gradient_of = dict(
        zip(info.initializer_names_to_train, info.initializer_grad_names_to_train, strict=True)
    )
    gradient_of.update(info.user_input_grad_names)
    return GradientGraph(
        model=model.SerializeToString(),
        optimized=False,
        feeds=tuple(value.name for value in model.graph.input),
        copies=work.copies,
        fetched=len(info.user_output_names) + len(info.frontier_node_arg_map),
        gradients=work.gradients,
        gradient_of={name: work.gradients.index(g) for name, g in gradient_of.items() if g in work.gradients},
        needed=work.needed,
        read_outputs=work.read_outputs,
        skipped=tuple(info.output_grad_indices_non_differentiable),
        inplace={name: plan.description() for name, plan in work.plans.items()},
        joined=tuple(chain.description() for chain in work.chains),
    )


def kept_gradient_graph(
    graph: Graph,
    requires_grad: frozenset[str],
    settings: Any,
    options: Options,
    shelf: Shelf,
) -> GradientGraph:
    """The gradient graph out of the cache, or built, optimised and put there.

    Args:
        graph: the exported graph.
        requires_grad: the graph inputs that require gradients.
        settings: of the session that optimises it; may be changed.
        options: providers, and what else the optimised graph depends on.
        shelf: the graph's place in the cache.

    Raises:
        UnsupportedOperatorError: onnxruntime-training has no gradient for an operator.
    """

    def make() -> Kept:
        gradient = build_gradient_graph(graph, requires_grad)
        model = optimize(gradient.model, settings, session_providers(options.providers))
        if model is not None:
            gradient = replace(gradient, model=model, optimized=True)
        return Kept(gradient.description(), {MODEL_FILE: gradient.model})

    kept = shelf.obtain(
        "gradient graph", {**identity(options), "requires_grad": json.dumps(sorted(requires_grad))}, make
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
    proto = mended(ir.to_proto(model))
    bind_nodes(proto.graph, graph.sites, training=True)
    cast_bools(proto.graph, graph.sites)
    return proto


def _configuration(graph: Graph, requires_grad: frozenset[str]) -> Any:
    ort = training_pybind()
    configuration = ort.OrtModuleGraphBuilderConfiguration()
    configuration.initializer_names = list(graph.weights)
    configuration.initializer_names_to_train = [n for n in graph.weights if n in requires_grad]
    configuration.input_names_require_grad = [n for n in graph.inputs if n in requires_grad]
    configuration.build_gradient_graph = True
    configuration.enable_caching = False
    configuration.loglevel = ort.Severity(onnxruntime_severity())
    configuration.use_memory_efficient_gradient = False
    return configuration
