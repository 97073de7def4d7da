"""Graphs that ONNX Runtime optimised, stored for the next process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from torch2ort.cache.key.key import Unkeyable
from torch2ort.cache.store.graph_entries import EntryContent, GraphEntries
from torch2ort.cache.store.manifest import sha256
from torch2ort.graph.external_weights import content_of
from torch2ort.log import logger
from torch2ort.options import Options
from torch2ort.providers import session_providers
from torch2ort.runtime import _ort_private as private
from torch2ort.runtime import stock
from torch2ort.runtime.donation import donate_inputs
from torch2ort.runtime.memory_saving_order import free_early
from torch2ort.runtime.workarounds.layernorm_centering import disabled_optimizers
from torch2ort.support.processor import processor_features

_MODEL_FILE = "model.onnx"


@dataclass(frozen=True)
class Optimization:
    """ONNX Runtime's optimisation of a model for this machine, after which the session does no other.

    Args:
        settings: those of the session that will run the model.
        providers: those of that session.
        donated: names of inputs that the run owns.
        frees_early: whether nodes are put in an order that frees memory early.
    """

    settings: Any
    providers: Sequence[Any]
    donated: Sequence[str] = ()
    frees_early: bool = False

    def of(self, model: onnx.ModelProto) -> onnx.ModelProto | None:
        """Return the optimised model; ``None`` if ONNX Runtime cannot write it to a file.

        Args:
            model: a model whose PythonOp nodes are bound.
        """
        source = content_of(model)
        optimized = None if source is None else _optimized(source, self.settings, self.providers)
        if optimized is None:
            return None
        proto = onnx.load_from_string(optimized)
        donate_inputs(proto.graph, self.donated)
        if self.frees_early:
            free_early(proto.graph)
        self._keep()
        return proto

    def obtain(
        self, model: onnx.ModelProto, kind: str, graph_entries: GraphEntries, identity: Mapping[str, str]
    ) -> onnx.ModelProto | None:
        """Return the optimised model as :meth:`of`, from the export cache or stored there.

        The key of a node's callee differs between processes; the entry has its position among the nodes
        instead.

        Args:
            model: a model whose PythonOp nodes are bound.
            kind: what the model is, for messages.
            graph_entries: where it is stored.
            identity: engine, machine and settings, on which the optimised graph depends.
        """
        positions = {key: str(i) for i, key in enumerate(stock.callee_keys(model.graph))}
        keys = {position: key for key, position in positions.items()}
        stock.rename_callees(model.graph, positions)
        content = content_of(model)
        stock.rename_callees(model.graph, keys)
        if content is None:
            return None
        order = {"donated": json.dumps(self.donated), "frees early": str(self.frees_early)}

        def make() -> EntryContent:
            proto = self.of(model)
            if proto is None:
                raise Unkeyable("ONNX Runtime does not write it down")
            stock.rename_callees(proto.graph, positions)
            return EntryContent({}, {_MODEL_FILE: proto.SerializeToString()})

        try:
            kept = graph_entries.obtain(kind, {**identity, **order, "model": sha256(content)}, make)
        except Unkeyable as reason:
            logger.info("the %s is not cached: %s.", kind, reason)
            return None
        proto = onnx.load_from_string(kept.files[_MODEL_FILE])
        stock.rename_callees(proto.graph, keys)
        self._keep()
        return proto

    def _keep(self) -> None:
        """Make the session leave its model unchanged, and run its nodes in their order."""
        run_as_it_is(self.settings)
        if self.frees_early:
            self.settings.execution_order = private.onnxruntime().ExecutionOrder.PRIORITY_BASED


def _optimized(model: bytes, settings: Any, providers: Sequence[Any]) -> bytes | None:
    """Let ONNX Runtime optimise a model.

    Args:
        model: ONNX, with bound PythonOp nodes.
        settings: those of the session that will run the result; they are changed to leave it unchanged.
        providers: those of that session.

    Returns:
        ONNX, or ``None`` if it cannot be written to a file; ``settings`` are then as before.
    """
    onnxruntime = private.onnxruntime()
    level = settings.graph_optimization_level
    try:
        with tempfile.TemporaryDirectory(prefix="torch2ort-") as folder:
            path = Path(folder, _MODEL_FILE)
            settings.optimized_model_filepath = str(path)
            onnxruntime.InferenceSession(
                model,
                settings,
                providers=list(providers),
                disabled_optimizers=disabled_optimizers(settings),
            )
            optimized = path.read_bytes()
        settings.optimized_model_filepath = ""
        run_as_it_is(settings)
        # A full disk may have truncated the file.
        onnxruntime.InferenceSession(optimized, settings, providers=list(providers))
    except Exception as error:
        logger.info("the optimised graph is not kept: %s", error)
        settings.optimized_model_filepath = ""
        settings.graph_optimization_level = level
        return None
    return optimized


def run_as_it_is(settings: Any) -> None:
    """Disable the optimisation of a session's model, which is optimised already."""
    settings.graph_optimization_level = private.onnxruntime().GraphOptimizationLevel.ORT_DISABLE_ALL


def identity(options: Options) -> Mapping[str, str]:
    """Return all that an optimised graph depends on besides the graph: engine, machine and settings."""
    onnxruntime = private.onnxruntime()
    return {
        "onnxruntime": f"{onnxruntime.__version__} {onnxruntime.get_build_info()}",
        # Optimised memory layouts depend on the processor's vector width: on another one they would be wrong.
        "machine": processor_features(),
        "deterministic": str(options.deterministic),
        "providers": json.dumps(session_providers(options.providers)),
    }
