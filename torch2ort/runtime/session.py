"""onnxruntime's InferenceSession, with PythonOp nodes that run and their exceptions as they were raised."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx
import torch

from torch2ort.errors import EngineError
from torch2ort.pythonop import Site
from torch2ort.pythonop.native import native
from torch2ort.runtime import _ort_private as private
from torch2ort.runtime import binding, stock
from torch2ort.runtime.guard import contexts_in, python_op_lock
from torch2ort.runtime.inplace import plan_inplace

_RUN_METHODS = ("run", "run_with_ort_values", "run_with_iobinding", "run_with_ortvaluevector")


def inference_session(
    proto: onnx.ModelProto,
    sites: dict[str, Site],
    *,
    providers: Sequence[Any] | None = None,
    session_options: Any = None,
) -> Any:
    """An ``onnxruntime.InferenceSession`` that can run the graph's PythonOp nodes.

    With onnxruntime-training they run in its own kernel, else in the custom operator of torch2ort's library.

    Args:
        proto: an exported model; it is not changed.
        sites: the site of each PythonOp node, by node name.
        providers: as for ``InferenceSession``; the CPU by default.
        session_options: as for ``InferenceSession``.

    Raises:
        RuntimeNotFoundError: no onnxruntime is installed.
        EngineError: onnxruntime refuses the model.
    """
    onnxruntime = private.onnxruntime()
    options = onnxruntime.SessionOptions() if session_options is None else session_options
    bound: Sequence[native.Site] = ()
    if sites:
        copy = onnx.ModelProto()
        copy.CopyFrom(proto)
        proto = copy
        if private.has_training():
            plans = plan_inplace(proto.graph, sites, {value.name for value in proto.graph.output})
            native_sites = binding.bind_sites(sites, plans, training=False)
            functions = {name: site.key for name, site in native_sites.items()}
            binding.bind_nodes(proto.graph, sites, functions, training=False)
            bound = list(native_sites.values())
        else:
            bound = stock.bind_nodes(proto.graph, sites)
            stock.register_library(options)
    try:
        return _session_class()(
            bound, proto.SerializeToString(), options, providers=list(providers or ["CPUExecutionProvider"])
        )
    except Exception as error:
        raise EngineError(f"onnxruntime {onnxruntime.__version__} refuses the model: {error}") from error


@contextlib.contextmanager
def surroundings(sites: Sequence[native.Site]) -> Iterator[None]:
    """What a run of a session with these sites needs around it."""
    if sites and private.has_training():
        with python_op_lock, contexts_in(None), torch.no_grad():
            yield
    else:
        yield


def take_error(error: Exception) -> BaseException | None:
    """The exception of a Function behind a failed run, with its traceback, if that was the cause."""
    return native.take_error() if private.has_training() else stock.take_error(error)


@functools.cache
def _session_class() -> Any:
    base = private.onnxruntime().InferenceSession

    def construct(self: Any, sites: Sequence[native.Site], *args: Any, **kwargs: Any) -> None:
        # Kept for set_providers, which makes the kernels again.
        self.python_op_sites = sites
        base.__init__(self, *args, **kwargs)

    def guarded(name: str) -> Callable[..., Any]:
        method = getattr(base, name)

        @functools.wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            with surroundings(self.python_op_sites):
                try:
                    return method(self, *args, **kwargs)
                except Exception as error:
                    failure = error
            # Outside of the handler, which would make onnxruntime's error the context of the Function's.
            raise take_error(failure) or failure

        return run

    methods = {name: guarded(name) for name in _RUN_METHODS}
    return type("InferenceSession", (base,), {"__init__": construct, "__doc__": base.__doc__, **methods})
