"""Inference: an exported graph runs forward only, on PyTorch's tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx
import torch

from torch2ort.cache.store.graph_entries import GraphEntries
from torch2ort.errors import EngineError
from torch2ort.graph.debug_dumps import save_optimized
from torch2ort.graph.graph import Graph
from torch2ort.log import onnxruntime_severity
from torch2ort.options import Options
from torch2ort.providers import CPU, session_providers
from torch2ort.pythonop import Site
from torch2ort.pythonop.autocast import off
from torch2ort.pythonop.native import native
from torch2ort.runtime import _ort_private as private
from torch2ort.runtime import stock
from torch2ort.runtime.contexts import contexts_in
from torch2ort.runtime.determinism import name_undeterministic
from torch2ort.runtime.eager_random import drawing_as_eager
from torch2ort.runtime.feeds import Feeds
from torch2ort.runtime.index_error import refused_index
from torch2ort.runtime.native_sites import Callee, original_feeds
from torch2ort.runtime.optimized_model import Optimization, identity
from torch2ort.runtime.ortvalues import bool_outputs, to_tensors
from torch2ort.runtime.profiling import active_tracer, describe
from torch2ort.runtime.session import native_session, refuse_missing, tuned_session
from torch2ort.runtime.step_io import Passing
from torch2ort.support.startup_timing import SESSION, timed

_NOTHING_TO_CALL = contextlib.nullcontext()


class InferenceEngine:
    """An engine that runs a graph forward only.

    Args:
        graph: the exported graph.
        options: threads and providers.
        graph_entries: where the optimised graph is stored for the next process.
    """

    # False for an engine on another device, which has feeds of its own.
    _in_cpp = True

    @timed(SESSION)
    def __init__(self, graph: Graph, options: Options, graph_entries: GraphEntries | None = None) -> None:
        self._graph = graph = drawing_as_eager(graph)
        self._options = options
        name_undeterministic(graph.proto.graph, graph.sites, options)
        describe(graph.proto.graph, graph.sites)
        providers = self._providers(options)
        feeds = {name: i for i, name in enumerate(graph.feeds)}
        originals = original_feeds(graph.proto.graph, graph.sites, feeds)
        self._has_originals = bool(originals)
        self._feeds = Feeds(len(graph.inputs))
        self._names, self._fetches = graph.feeds, list(graph.fetches)
        self._bools = bool_outputs(graph.proto.graph, graph.fetches)
        self._half: native.Half | None = None
        self._session: Any = None
        self._bound: Sequence[Callee] = ()
        if self._in_cpp and providers == [CPU] and active_tracer() is None:
            passing = replace(Passing.through(len(feeds), len(self._fetches)), varying=len(graph.inputs))
            settings = self._settings()
            optimize = self._optimize(settings, providers, graph_entries)
            names = self._names, self._fetches
            made = native_session(graph, settings, names, passing, originals=originals, optimize=optimize)
            # The callees are kept alive as long as the nodes.
            self._half, self._bound = made or (None, ())
        if self._half is None:
            settings = self._settings()
            self._session = tuned_session(
                graph.proto,
                graph.sites,
                settings,
                providers=providers,
                originals=originals,
                optimize=self._optimize(settings, providers, graph_entries),
            )
            if options.providers:
                refuse_missing(self._session, providers)
            private.drop_model_bytes(self._session)

    def _settings(self) -> Any:
        settings = private.onnxruntime().SessionOptions()
        settings.log_severity_level = onnxruntime_severity()
        settings.intra_op_num_threads = self._options.intra_op_threads or torch.get_num_threads()
        settings.use_deterministic_compute = self._options.deterministic
        if self._graph.weights:
            # Weights are inputs, as training changes them between calls.
            settings.add_session_config_entry("session.disable_prepacking", "1")
        save_optimized(self._options, "inference_optimized", settings)
        return settings

    def _optimize(self, settings: Any, providers: Sequence[Any], graph_entries: GraphEntries | None) -> Any:
        """Return the function that optimises a model and caches it; ``None`` where it is not cached."""
        if graph_entries is None or not self._graph.weights:
            # An entry must not contain weights, or values computed from them.
            return None
        optimization = Optimization(settings, providers)
        return functools.partial(
            optimization.obtain,
            kind="inference graph",
            graph_entries=graph_entries,
            identity=identity(self._options),
        )

    # Replaced by engines on another device.
    def _providers(self, options: Options) -> list[Any]:
        return session_providers(options.providers)

    def run(self, feeds: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the graph and return one tensor per entry of ``graph.fetches``.

        Args:
            feeds: one tensor per entry of ``graph.feeds``.

        Raises:
            EngineError: ONNX Runtime failed. An exception of a Function is raised unchanged.
        """
        if self._half is not None:
            return self._run_half(self._half, feeds)
        values = self._values(feeds)
        failure: BaseException | None = None
        with self._around_functions(feeds) if self._graph.sites else _NOTHING_TO_CALL:
            try:
                fetched = self._session._sess.run_with_ort_values(values, self._fetches, None)
            except Exception as error:
                failure = stock.take_error(error) or self._refused_index(values) or engine_error(error)
        # Outside of the handler, which would make onnxruntime's error the context of the Function's.
        if failure is not None:
            raise failure
        return to_tensors(fetched, self._bools)

    def _run_half(self, half: native.Half, feeds: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the graph with tensors passed in C++."""
        run = native.Run()
        if self._has_originals:
            run.originals = tuple(feeds)
        try:
            with off() if self._graph.sites else _NOTHING_TO_CALL:
                return half.run(None, feeds, run)[0]
        except EngineError as error:
            refused = self._refused_index(self._values(feeds))
            if refused is None:
                raise
            failure = refused
            failure.__cause__ = error
        raise failure

    def _values(self, feeds: Sequence[torch.Tensor]) -> dict[str, Any]:
        return dict(zip(self._names, self._feeds.values(feeds), strict=True))

    @contextlib.contextmanager
    def _around_functions(self, feeds: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let Functions run without gradients, and get the fed tensors themselves."""
        run = None
        if self._has_originals:
            run = native.Run()
            run.originals = tuple(feeds)
        with contexts_in(run), torch.no_grad(), off():
            yield

    def _refused_index(self, values: Mapping[str, Any]) -> Exception | None:
        def session(model: onnx.ModelProto, sites: Mapping[str, Site]) -> Any:
            settings = private.onnxruntime().SessionOptions()
            settings.log_severity_level = 4
            return tuned_session(model, sites, settings)

        return refused_index(self._graph.proto, self._graph.sites, values, session)


def engine_error(error: Exception) -> EngineError:
    """Return the error for a failed run of ONNX Runtime."""
    failure = EngineError(f"ONNX Runtime failed: {error}")
    failure.__cause__ = error
    return failure
