"""Training session: onnxruntime-training's gradient graph over an exported graph.

ONNX Runtime runs the forward half up to the model's outputs, keeps the state, and runs the backward half
when autograd hands over the outputs' gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from torch2ort import symbolics
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.options import Options
from torch2ort.pythonop.native import native
from torch2ort.runtime import _ort_private as private
from torch2ort.runtime.binding import bind_nodes, reraise
from torch2ort.runtime.feeds import Feeds
from torch2ort.runtime.graph import Graph
from torch2ort.runtime.guard import contexts_in, python_op_lock
from torch2ort.runtime.reach import Edge, Reach


@dataclass(slots=True)
class ForwardState:
    """What one forward leaves for its backward.

    Attributes:
        partial: ONNX Runtime's state between the two halves of the graph.
        run: contexts of the Functions.
        outputs: shape, dtype and device of each fetched output, for the gradients that are missing.
    """

    partial: Any
    run: native.Run
    outputs: list[tuple[torch.Size, torch.dtype, torch.device]]


class TrainingEngine:
    """Gradient graph and session for one graph and one set of tensors that require gradients.

    Args:
        graph: the exported graph.
        requires_grad: the graph inputs (model inputs and weights) that require gradients.
        options: threads and debugging.

    Attributes:
        differentiable: positions of the fetched outputs that depend on a tensor that requires gradients.
        needed: positions of the feeds that the backward half reads, so that they must not change
            between forward and backward.
        read: positions of the feeds that the graph does not itself write to.
        uses_rng: whether a run draws from PyTorch's random generator.

    Raises:
        RuntimeNotFoundError: no training build of onnxruntime is installed.
        UnsupportedOperatorError: the engine has no gradient or kernel for an operator.
    """

    def __init__(self, graph: Graph, requires_grad: frozenset[str], options: Options) -> None:
        self._ort = private.training_pybind()
        self._graph = graph
        self._requires_grad = requires_grad
        self._reach = Reach(graph)
        self.differentiable = tuple(
            i
            for i, name in enumerate(graph.fetches)
            if i < len(graph.outputs) and self._reach.inputs([name]) & requires_grad
        )
        written = {m.target for m in graph.mutations}
        origins = [*graph.inputs, *graph.weights.values()]
        self.read = tuple(i for i, origin in enumerate(origins) if origin not in written)
        self.uses_rng = graph.uses_rng
        session_graph = self._session_graph()
        sites = bind_nodes(session_graph.graph, graph.sites, training=True)
        self._site_nodes = {bound.key: name for name, bound in sites.items()}
        self._feeds = Feeds(self._ort, len(graph.inputs))
        self._lock: Any = python_op_lock if sites else contextlib.nullcontext()
        self._build(session_graph, options)

    def _session_graph(self) -> onnx.ModelProto:
        model = ir.from_proto(self._graph.proto)
        symbolics.lower_stop_gradients(model)
        return ir.to_proto(model)

    def _build(self, proto: onnx.ModelProto, options: Options) -> None:
        ort = self._ort
        builder = ort.OrtModuleGraphBuilder()
        try:
            builder.initialize(proto.SerializeToString(), self._builder_configuration())
            transformers = ort.TrainingGraphTransformerConfiguration()
            transformers.propagate_cast_ops_config = ort.PropagateCastOpsConfiguration()
            # Its rewrites returned logits of a wrong shape on 1.19.2.
            transformers.enable_compute_optimizer = False
            builder.build(transformers)
        except Exception as error:
            raise _no_gradient(error) from error
        info = builder.get_graph_info()
        gradient = onnx.load_from_string(builder.get_gradient_model())
        self._fetched_gradients = [output.name for output in gradient.graph.output]
        _restore_output_types(gradient.graph, proto.graph)
        _protect_memory(gradient.graph, self._graph)
        _allow_empty_tensors(gradient.graph, proto.graph)
        self.needed = _read_in_backward(gradient.graph, self._graph.feeds)
        session = self._session(gradient, options)
        device = ort.OrtDevice(ort.OrtDevice.cpu(), ort.OrtDevice.default_memory(), 0)
        feeds = [value.name for value in gradient.graph.input]
        self._feed_order = [self._graph.feeds.index(name) for name in feeds]
        self._agent = ort.TrainingAgent(
            session._sess,
            feeds,
            [device] * (len(info.user_output_names) + len(info.frontier_node_arg_map)),
            self._fetched_gradients,
            [device] * len(self._fetched_gradients),
            0,
        )
        self._session_kept = session
        self._skipped = set(info.output_grad_indices_non_differentiable)
        gradient_of = dict(
            zip(info.initializer_names_to_train, info.initializer_grad_names_to_train, strict=True)
        )
        gradient_of.update(info.user_input_grad_names)
        self._gradient_of = {
            name: self._fetched_gradients.index(g)
            for name, g in gradient_of.items()
            if g in self._fetched_gradients
        }

    def _builder_configuration(self) -> Any:
        ort, graph = self._ort, self._graph
        configuration = ort.OrtModuleGraphBuilderConfiguration()
        configuration.initializer_names = list(graph.weights)
        configuration.initializer_names_to_train = [n for n in graph.weights if n in self._requires_grad]
        configuration.input_names_require_grad = [n for n in graph.inputs if n in self._requires_grad]
        configuration.build_gradient_graph = True
        configuration.enable_caching = False
        configuration.loglevel = ort.Severity.ERROR
        configuration.use_memory_efficient_gradient = False
        return configuration

    def _session(self, gradient: onnx.ModelProto, options: Options) -> Any:
        onnxruntime = private.onnxruntime()
        settings = onnxruntime.SessionOptions()
        settings.enable_mem_pattern = False
        # Buffers cross to PyTorch and back; their lifetime is the tensors', not the plan's.
        settings.enable_mem_reuse = False
        settings.log_severity_level = 3
        settings.intra_op_num_threads = options.intra_op_threads or torch.get_num_threads()
        settings.inter_op_num_threads = 1
        settings.use_deterministic_compute = options.deterministic
        # Weights are inputs that every step changes: a packed copy would go stale.
        settings.add_session_config_entry("session.disable_prepacking", "1")
        try:
            return onnxruntime.InferenceSession(
                gradient.SerializeToString(), settings, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise _no_gradient(error) from error

    def forward(self, feeds: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], ForwardState]:
        """Run the forward half.

        Args:
            feeds: one tensor per entry of ``graph.feeds``.

        Returns:
            One tensor per entry of ``graph.fetches``, and the state for :meth:`backward`.

        Raises:
            EngineError: ONNX Runtime failed. An exception of a Function arrives as it is.
        """
        ort = self._ort
        made = self._feeds.values(feeds)
        values = ort.OrtValueVector()
        values.reserve(len(made))
        for index in self._feed_order:
            values.push_back(made[index])
        fetched = ort.OrtValueVector()
        partial = ort.PartialGraphExecutionState()
        run = native.Run()
        with self._lock, contexts_in(run):
            try:
                self._agent.run_forward(values, fetched, partial, None)
            except Exception as error:
                reraise(error)
        outputs = _tensors(fetched)
        return outputs, ForwardState(partial, run, [(t.shape, t.dtype, t.device) for t in outputs])

    def backward(
        self, state: ForwardState, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Run the backward half.

        Args:
            state: what :meth:`forward` left; it serves once.
            gradients: one per fetched output; ``None`` where the loss does not depend on it.

        Returns:
            One entry per feed: its gradient, or ``None`` where autograd would give none.

        Raises:
            EngineError: ONNX Runtime failed. An exception of a Function arrives as it is.
        """
        given = self._ort.OrtValueVector()
        for i, gradient in enumerate(gradients):
            if i in self._skipped:
                continue
            if gradient is None:
                # The builder's backward breaks on a scalar zero: always the full shape.
                shape, dtype, device = state.outputs[i]
                gradient = torch.zeros(shape, dtype=dtype, device=device)
            given.push_back(to_dlpack(gradient.detach().contiguous()), False)
        computed = self._ort.OrtValueVector()
        with self._lock, contexts_in(state.run):
            try:
                self._agent.run_backward(given, computed, state.partial)
            except Exception as error:
                reraise(error)
        found = _tensors(computed)
        reached = self._reached(state.run, gradients)
        state.run.clear()
        return [
            found[self._gradient_of[name]] if name in reached and name in self._gradient_of else None
            for name in self._graph.feeds
        ]

    def _reached(self, run: native.Run, gradients: Sequence[torch.Tensor | None]) -> frozenset[str]:
        outputs = [
            name
            for name, gradient in zip(self._graph.fetches, gradients, strict=True)
            if gradient is not None
        ]
        undefined: list[Edge] = [(self._site_nodes[key], position) for key, position in run.undefined]
        return self._reach.inputs(outputs, undefined)


def _tensors(values: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = values.to_dlpacks(from_dlpack)
    for index in values.bool_tensor_indices():
        tensors[index] = tensors[index].view(torch.bool)
    return tensors


def _restore_output_types(gradient: onnx.GraphProto, graph: onnx.GraphProto) -> None:
    """The model's outputs lose their type in the gradient graph, and the session asks for it."""
    known = {value.name for value in gradient.value_info}
    gradient.value_info.extend(output for output in graph.output if output.name not in known)


def _protect_memory(gradient: onnx.GraphProto, graph: Graph) -> None:
    """Keep ONNX Runtime from writing over what a Function may still hold.

    Its memory planner lets an operator write its result over an input that nothing reads afterwards,
    and cannot know that a Function still does. A graph output is never written over. So the inputs that
    sites keep, and their outputs, become graph outputs, which nobody fetches: no byte is copied.
    """
    taken = {value.name for value in (*gradient.input, *gradient.output)}
    types = {value.name: value for value in gradient.value_info}
    for node in gradient.node:
        site = graph.sites.get(node.name)
        if site is None or node.op_type != "PythonOp":
            continue
        arguments = dict(zip(site.tensor_positions, node.input, strict=True))
        for name in (*(arguments[position] for position in site.known_result.kept), *node.output[1:]):
            if name and name not in taken:
                taken.add(name)
                gradient.output.append(types.get(name) or onnx.helper.make_empty_tensor_value_info(name))


def _allow_empty_tensors(gradient: onnx.GraphProto, graph: onnx.GraphProto) -> None:
    """Let a size of 0 mean 0 in the shapes that the gradient builder computes, not "as before"."""
    own = {node.name for node in graph.node}
    for node in gradient.node:
        if node.op_type == "Reshape" and node.name not in own:
            kept = [a for a in node.attribute if a.name != "allowzero"]
            del node.attribute[:]
            node.attribute.extend([*kept, onnx.helper.make_attribute("allowzero", 1)])


def _read_in_backward(gradient: onnx.GraphProto, feeds: Sequence[str]) -> tuple[int, ...]:
    """Positions of the feeds that a node behind the model's outputs reads."""
    reached = {name for node in gradient.node if node.op_type == "YieldOp" for name in node.output}
    read: set[str] = set()
    for node in gradient.node:
        if reached & set(node.input):
            reached.update(node.output)
            read.update(node.input)
    return tuple(i for i, name in enumerate(feeds) if name in read)


def _no_gradient(error: Exception) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f"onnxruntime-training cannot build this model's gradient graph: {error}. "
        f"Put the operator into a torch.autograd.Function, which keeps PyTorch's kernel"
    )
