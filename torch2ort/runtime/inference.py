"""Inference session over an exported graph; weights are fed, so that they are always the live ones."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import onnx
import torch
from torch.utils.dlpack import from_dlpack

from torch2ort.errors import EngineError
from torch2ort.options import Options
from torch2ort.runtime import _ort_private as private
from torch2ort.runtime.binding import bind_nodes, reraise
from torch2ort.runtime.feeds import Feeds
from torch2ort.runtime.graph import Graph
from torch2ort.runtime.guard import contexts_in, python_op_lock


def inference_session(
    proto: onnx.ModelProto,
    sites: dict[str, Any],
    *,
    providers: Sequence[Any] | None = None,
    session_options: Any = None,
) -> Any:
    """An ``onnxruntime.InferenceSession`` that can run the graph's PythonOp nodes.

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
    if sites:
        if not private.has_training():
            raise EngineError(
                f"the model calls Functions ({', '.join(sorted({s.func_name for s in sites.values()}))}), "
                f"which the inference build "
                f"onnxruntime {onnxruntime.__version__} cannot run yet; install onnxruntime-training-cpu "
                f"1.19.2 (Python 3.11)"
            )
        session_proto = onnx.ModelProto()
        session_proto.CopyFrom(proto)
        bind_nodes(session_proto.graph, sites, training=False)
        proto = session_proto
    try:
        return onnxruntime.InferenceSession(
            proto.SerializeToString(), session_options, providers=list(providers or ["CPUExecutionProvider"])
        )
    except Exception as error:
        raise EngineError(f"onnxruntime {onnxruntime.__version__} refuses the model: {error}") from error


class InferenceEngine:
    """Runs a graph forward only.

    Args:
        graph: the exported graph.
        options: threads.
    """

    def __init__(self, graph: Graph, options: Options) -> None:
        self._graph = graph
        self._ort = private.pybind()
        settings = private.onnxruntime().SessionOptions()
        settings.log_severity_level = 3
        settings.intra_op_num_threads = options.intra_op_threads or torch.get_num_threads()
        settings.use_deterministic_compute = options.deterministic
        # Weights are inputs, which training changes between calls.
        settings.add_session_config_entry("session.disable_prepacking", "1")
        self._session = inference_session(graph.proto, graph.sites, session_options=settings)
        self._feeds = Feeds(self._ort, len(graph.inputs))
        self._lock: Any = python_op_lock if graph.sites else contextlib.nullcontext()

    def run(self, feeds: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One tensor per entry of ``graph.fetches``.

        Args:
            feeds: one tensor per entry of ``graph.feeds``.

        Raises:
            EngineError: ONNX Runtime failed. An exception of a Function arrives as it is.
        """
        values = dict(zip(self._graph.feeds, self._feeds.values(feeds), strict=True))
        with self._lock, contexts_in(None), torch.no_grad():
            try:
                fetched = self._session._sess.run_with_ort_values(values, list(self._graph.fetches), None)
            except Exception as error:
                reraise(error)
        return [_tensor(value) for value in fetched]


def _tensor(value: Any) -> torch.Tensor:
    tensor = from_dlpack(value.to_dlpack())
    return tensor.view(torch.bool) if value.data_type() == "tensor(bool)" else tensor
