"""onnxruntime's InferenceSession with PythonOp nodes, which raises the exceptions of Functions unchanged."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import onnx
import torch

from torch2ort.errors import EngineError
from torch2ort.graph.external_weights import loadable
from torch2ort.graph.graph import Graph
from torch2ort.log import onnxruntime_severity
from torch2ort.providers import name_of
from torch2ort.pythonop import Site
from torch2ort.pythonop.native import native
from torch2ort.runtime import _ort_private as private
from torch2ort.runtime import stock
from torch2ort.runtime.custom_op.in_place import follows_maps
from torch2ort.runtime.custom_op.output_allocator import forget_output_sizes, lent_allocator
from torch2ort.runtime.eager_random import with_eager_draws
from torch2ort.runtime.native_sites import Callee, OriginalFeeds
from torch2ort.runtime.profiling import profiled
from torch2ort.runtime.step_io import Passing, native_half
from torch2ort.runtime.workarounds import apply_workarounds
from torch2ort.runtime.workarounds.layernorm_centering import disabled_optimizers

_RUN_METHODS = ("run", "run_with_ort_values", "run_with_iobinding", "run_with_ortvaluevector")


def inference_session(
    proto: onnx.ModelProto,
    sites: Mapping[str, Site],
    *,
    providers: Sequence[Any] | None = None,
    session_options: Any = None,
) -> Any:
    """Create an ``onnxruntime.InferenceSession`` that can run the graph's PythonOp nodes.

    These nodes run in the custom operator of torch2ort's library.

    Args:
        proto: an exported model; it is not changed.
        sites: the site of each PythonOp node, by node name.
        providers: as for ``InferenceSession``; the CPU by default.
        session_options: as for ``InferenceSession``.

    Raises:
        RuntimeNotFoundError: no onnxruntime is installed.
        EngineError: onnxruntime refuses the model.
    """
    proto, sites = with_eager_draws(proto, sites)
    if session_options is None:
        settings = private.onnxruntime().SessionOptions()
        settings.log_severity_level = onnxruntime_severity()
        settings.use_deterministic_compute = torch.are_deterministic_algorithms_enabled()
        return tuned_session(proto, sites, settings, providers=providers)
    model, bound = _bind(proto, sites, session_options, in_place=follows_maps(providers))
    with loadable(model) as source:
        return make_session(source, bound, session_options, providers)


def tuned_session(
    proto: onnx.ModelProto,
    sites: Mapping[str, Site],
    settings: Any,
    *,
    providers: Sequence[Any] | None = None,
    originals: OriginalFeeds | None = None,
    optimize: Callable[[onnx.ModelProto], onnx.ModelProto | None] | None = None,
) -> Any:
    """Create a session as :func:`inference_session`, with settings that torch2ort may change.

    Args:
        proto: an exported model; it is not changed.
        sites: the site of each PythonOp node, by node name.
        settings: ``SessionOptions`` of torch2ort's own, which are changed.
        providers: as for ``InferenceSession``; the CPU by default.
        originals: see :func:`torch2ort.runtime.native_sites.original_feeds`.
        optimize: returns the model as ONNX Runtime optimises it, or ``None``; ``None`` to leave that to the
            session.

    Raises:
        EngineError: onnxruntime refuses the model.
    """
    model, bound = _bind(proto, sites, settings, originals, in_place=follows_maps(providers))
    with lent_allocator(settings) if sites else nullcontext(False) as lent:
        if lent:
            forget_output_sizes(model.graph)
        optimized = None if optimize is None else optimize(model)
        with loadable(model if optimized is None else optimized) as source:
            return make_session(source, bound, settings, providers)


def native_session(
    graph: Graph,
    settings: Any,
    names: tuple[Sequence[str], Sequence[str]],
    passing: Passing,
    *,
    originals: OriginalFeeds | None = None,
    optimize: Callable[[onnx.ModelProto], onnx.ModelProto | None] | None = None,
) -> tuple[native.Half, Sequence[Callee]] | None:
    """Create a session as :func:`tuned_session` on the CPU, with tensors passed in C++.

    Args:
        graph: the graph.
        settings: as for :func:`tuned_session`.
        names: names of the feeds, and names of the fetches.
        passing: the use of feeds and fetches.
        originals: as for :func:`tuned_session`.
        optimize: as for :func:`tuned_session`.

    Returns:
        The session, and the callees of its nodes; ``None`` where onnxruntime does not share its environment.

    Raises:
        EngineError: onnxruntime refuses the model.
    """
    model = apply_workarounds(graph.proto)
    bound: Sequence[Callee] = ()
    stock.register_library(settings)
    registered = native.registered_options()
    if graph.sites or optimize is not None:
        own = onnx.ModelProto()
        own.CopyFrom(model)
        model, bound = own, stock.bind_nodes(own.graph, graph.sites, originals, in_place=follows_maps(None))
        model.opset_import.MergeFrom(_missing_imports(model))
    # A session without Functions has none of their outputs.
    with lent_allocator(settings if graph.sites else private.onnxruntime().SessionOptions()) as lent:
        if not lent:
            return None
        if graph.sites:
            forget_output_sizes(model.graph)
        optimized = None if optimize is None else optimize(model)
        with loadable(model if optimized is None else optimized) as source:
            missing = _missing_imports(model)
            if missing and isinstance(source, str):
                return None
            if missing and isinstance(source, bytes):
                # Concatenated protobuf messages are merged: adding an import does not copy the weights.
                source += onnx.ModelProto(opset_import=missing).SerializeToString()
            return native_half(source, *names, passing, settings, registered), bound


def _missing_imports(model: onnx.ModelProto) -> list[onnx.OperatorSetIdProto]:
    """Return the import of the domain of ONNX Runtime's fusions, which custom operators need, if missing."""
    is_there = any(entry.domain == "com.microsoft" for entry in model.opset_import)
    return [] if is_there else [onnx.helper.make_opsetid("com.microsoft", 1)]


def _bind(
    proto: onnx.ModelProto,
    sites: Mapping[str, Site],
    settings: Any,
    originals: OriginalFeeds | None = None,
    *,
    in_place: bool,
) -> tuple[onnx.ModelProto, Sequence[Callee]]:
    """Return the model for a session with these settings, and the callees of its PythonOp nodes."""
    proto = apply_workarounds(proto)
    if not sites:
        return proto, ()
    stock.register_library(settings)
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    return model, stock.bind_nodes(model.graph, sites, originals, in_place=in_place)


def make_session(
    model: bytes | str, bound: Sequence[Callee], settings: Any, providers: Sequence[Any] | None = None
) -> Any:
    """Create a session from a model whose PythonOp nodes are bound.

    Args:
        model: ONNX, or the path of a file.
        bound: their callees.
        settings: ``SessionOptions``.
        providers: as for ``InferenceSession``; the CPU by default.

    Raises:
        EngineError: onnxruntime refuses the model.
    """
    try:
        with profiled(settings) as made:
            made.append(
                _session_class()(
                    bound,
                    model,
                    settings,
                    providers=list(providers or ["CPUExecutionProvider"]),
                    disabled_optimizers=disabled_optimizers(settings),
                )
            )
        return made[0]
    except Exception as error:
        version = private.onnxruntime().__version__
        raise EngineError(f"onnxruntime {version} refuses the model: {error}") from error


def refuse_missing(session: Any, providers: Sequence[Any]) -> None:
    """Refuse a session that fell back to the CPU: ONNX Runtime reports a missing provider in a log line only.

    Args:
        session: the session.
        providers: the providers that were requested.

    Raises:
        EngineError: names the first provider that is missing.
    """
    present = session.get_providers()
    for name in map(name_of, providers):
        if name not in present:
            raise EngineError(
                f"Option 'providers' names {name!r}, which onnxruntime {private.onnxruntime().__version__} "
                f"could not start; its own message on stderr says why. Leave it out to run on "
                f"{', '.join(present)}"
            )


@functools.cache
def _session_class() -> Any:
    base = private.onnxruntime().InferenceSession

    def construct(self: Any, callees: Sequence[Callee], *args: Any, **kwargs: Any) -> None:
        # Kept alive for set_providers, which creates the kernels again.
        self.python_op_callees = callees
        base.__init__(self, *args, **kwargs)

    def guarded(name: str) -> Callable[..., Any]:
        method = getattr(base, name)

        @functools.wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                failure = stock.take_error(error) or error
            # Outside of the handler, which would make onnxruntime's error the context of the Function's.
            raise failure

        return run

    methods = {name: guarded(name) for name in _RUN_METHODS}
    return type("InferenceSession", (base,), {"__init__": construct, "__doc__": base.__doc__, **methods})
