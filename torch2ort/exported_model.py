"""The result of an export: a graph, its calls of Functions, and the structure around it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import torch

from torch2ort import io_schema
from torch2ort.cache.report import CacheReport
from torch2ort.graph.file import read, save
from torch2ort.graph.file_form import file_form
from torch2ort.graph.function_calls import inline_bodies
from torch2ort.graph.graph import Graph
from torch2ort.graph.interface import Interface
from torch2ort.graph.rename_values import rename_values
from torch2ort.graph.weights import state_of, with_weights
from torch2ort.options import Options, with_arguments
from torch2ort.providers import session_providers
from torch2ort.pythonop import PythonOpSite
from torch2ort.runtime import InferenceEngine, inference_session
from torch2ort.runtime.memory_overlap import WrittenMemory
from torch2ort.runtime.session import refuse_missing


class ExportedModel:
    """An exported model: an ONNX graph, the Functions that it calls, and its calling convention.

    Attributes:
        training: the mode that was exported.
        cache: the use of the export cache.
    """

    def __init__(
        self,
        graph: Graph | Callable[[], Graph],
        weights: Mapping[str, torch.Tensor],
        interface: Interface,
        *,
        training: bool,
        options: Options,
        cache: CacheReport | None = None,
        folds: bool = True,
    ) -> None:
        self._made = graph
        self._weights = weights
        self._interface = interface
        self._options = options
        self._folds = folds
        # The keys are values of PyTorch's flag of determinism.
        self._engines: dict[bool, InferenceEngine] = {}
        self.training = training
        self.cache = cache or CacheReport()

    @functools.cached_property
    def _graph(self) -> Graph:
        """The graph; that of a training step is translated on the first access."""
        return self._made if isinstance(self._made, Graph) else self._made()

    @property
    def proto(self) -> onnx.ModelProto:
        """The model with its weights as initializers, and its current state.

        State, the buffers that the model itself updates, is also an input: its initializer is the value in a
        session if no other value is fed.

        The model of :attr:`torch2ort.ORTModule.exported` has the current weights at each access.
        """
        return file_form(self._run, is_own=bool(self._graph.weights))

    @property
    def _run(self) -> onnx.ModelProto:
        """The model in the form of sessions, except that calls of Functions with bodies are not inlined."""
        if self._graph.weights:
            return with_weights(self._graph, self._weights, folds=self._folds)
        return self._graph.proto

    @property
    def input_schema(self) -> io_schema.Schema:
        """Schema of the arguments, bound to their names."""
        return self._interface.inputs

    @property
    def output_schema(self) -> io_schema.Schema:
        """Schema of the model's result."""
        return self._interface.outputs

    @property
    def python_ops(self) -> tuple[PythonOpSite, ...]:
        """Every PythonOp node of the graph, in the order of the nodes."""
        return tuple(
            PythonOpSite(site.func_name, site.function, name, site.constants)
            for name, site in self._graph.sites.items()
            if not site.internal
        )

    def renamed(self, names: Mapping[str, str], texts: Mapping[str, str] | None = None) -> ExportedModel:
        """Return the same model with other names of values: inputs, outputs, initializers.

        Args:
            names: old name -> new name.
            texts: new name of an initializer -> its documentation.
        """
        graph, interface = rename_values(self._graph, self._interface, names)
        for initializer in graph.proto.graph.initializer:
            initializer.doc_string = (texts or {}).get(initializer.name, initializer.doc_string)
        weights = {names.get(name, name): value for name, value in self._weights.items()}
        return ExportedModel(
            graph,
            weights,
            interface,
            training=self.training,
            options=self._options,
            cache=self.cache,
            folds=self._folds,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to one ``.onnx`` file, atomically; above 2 GiB its weights go to a file beside it.

        Args:
            path: the file; an existing one is replaced.

        Raises:
            ExportError: an argument of a Function is an object that a file cannot store.
            OSError: the file cannot be written.
        """
        save(Path(path), self.proto, self._graph, self._interface, training=self.training)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph on ONNX Runtime, without gradients, in the mode that was exported.

        Tensors are assumed to have the memory layout of the sample's, which matters if ``forward`` draws
        random numbers for a tensor, or writes into a ``reshape`` of it.

        Buffers that the model updates are state, as in the model: a call starts from the state after the last
        one.
        Calls of :attr:`torch2ort.ORTModule.exported` update the module's own buffers.

        Raises:
            SchemaMismatchError: the call differs from the exported one.
            ExportError: forward writes to memory that two arguments share, or an argument and a weight.
            EngineError: ONNX Runtime failed. An exception of a Function is propagated unchanged.
        """
        tensors, bound = self._interface.tensors(args, kwargs)
        graph = self._graph
        weights = [self._weights[name] for name in graph.weights]
        if graph.mutations:
            written = WrittenMemory(graph.inputs, graph.mutations, self._interface.same)
            written.refuse_shared(type(self).__name__, tensors, [*graph.weights.values()], weights)
        fetched = self._engine().run([*tensors, *weights])
        if graph.mutations:
            self._write(tensors, fetched[len(graph.outputs) :])
            del fetched[len(graph.outputs) :]
        return self._interface.result(bound, fetched)

    def _write(self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Write the values of a run's mutations to the call's tensors and the state."""
        inputs = dict(zip(self._graph.inputs, tensors, strict=True))
        state = {origin: self._weights[name] for name, origin in state_of(self._graph).items()}
        with torch.no_grad():
            for mutation, value in zip(self._graph.mutations, values, strict=True):
                # A buffer that is written and never read is not state.
                target = (inputs if mutation.kind == "input" else state).get(mutation.target)
                if target is not None:
                    target.copy_(value)

    def _engine(self) -> InferenceEngine:
        deterministic = torch.are_deterministic_algorithms_enabled()
        if deterministic not in self._engines:
            options = with_arguments(self._options, deterministic=deterministic or None)
            graph = replace(self._graph, proto=inline_bodies(self._graph.proto))
            self._engines[deterministic] = InferenceEngine(graph, options)
        return self._engines[deterministic]

    def session(self, *, providers: Sequence[Any] | None = None, session_options: Any = None) -> Any:
        """Return an ``onnxruntime.InferenceSession`` over the graph, PythonOp nodes included.

        Args:
            providers: as for ``InferenceSession``; by default those of :class:`torch2ort.Options`, or the
                CPU.
            session_options: as for ``InferenceSession``.

        Raises:
            RuntimeNotFoundError: no onnxruntime is installed.
            EngineError: onnxruntime refuses the model, or does not use a provider of
                :class:`torch2ort.Options`.
        """
        chosen = session_providers(self._options.providers) if providers is None else providers
        session = inference_session(
            inline_bodies(self._run), self._graph.sites, providers=chosen, session_options=session_options
        )
        if providers is None:
            refuse_missing(session, chosen)
        return session

    def __repr__(self) -> str:
        mode = "training" if self.training else "inference"
        nodes = len(self._graph.proto.graph.node)
        return f"ExportedModel({mode}, {nodes} nodes, {len(self.python_ops)} PythonOps)"


def load(
    path: str | os.PathLike[str], *, functions: Iterable[type[torch.autograd.Function]] = ()
) -> ExportedModel:
    """Read a model that :meth:`ExportedModel.save` wrote.

    A name in the file resolves only to one of ``functions`` or to a class registered with
    :func:`torch2ort.register_function`: nothing is imported, and no address in a file is ever used.

    Args:
        path: the ``.onnx`` file.
        functions: the classes that the model's PythonOp nodes call.

    Raises:
        ModelLoadError: the file is damaged, was not written by torch2ort, or calls a class with arguments
            that it does not accept.
        FunctionNotFoundError: a name is not resolved; lists all of them.
        RegistryError: ``functions`` is not a list of classes.
    """
    saved = read(Path(path), functions)
    return ExportedModel(
        saved.graph, saved.state, saved.interface, training=saved.training, options=Options()
    )
