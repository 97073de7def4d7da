"""Graphs as ONNX Runtime's optimisers leave them, to be kept for the next process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch2ort.log import logger
from torch2ort.options import Options
from torch2ort.providers import session_providers
from torch2ort.runtime import _ort_private as private
from torch2ort.runtime.workarounds.layernorm_centering import disabled_optimizers
from torch2ort.support.processor import processor_features

MODEL_FILE = "model.onnx"


def optimize(model: bytes, settings: Any, providers: Sequence[Any]) -> bytes | None:
    """Let ONNX Runtime optimise a model for this machine.

    Args:
        model: ONNX; its PythonOp nodes are bound.
        settings: of the session that will run it; they are changed to run what comes out as it is.
        providers: of that session.

    Returns:
        ONNX, or ``None`` if it cannot be written down; ``settings`` are then as before.
    """
    onnxruntime = private.onnxruntime()
    level = settings.graph_optimization_level
    try:
        with tempfile.TemporaryDirectory(prefix="torch2ort-") as folder:
            path = Path(folder, MODEL_FILE)
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
        # A disk that was full may have cut it off.
        onnxruntime.InferenceSession(optimized, settings, providers=list(providers))
    except Exception as error:
        logger.info("the optimised graph is not kept: %s", error)
        settings.optimized_model_filepath = ""
        settings.graph_optimization_level = level
        return None
    return optimized


def run_as_it_is(settings: Any) -> None:
    """Let a session leave its model alone, which was optimised before."""
    settings.graph_optimization_level = private.onnxruntime().GraphOptimizationLevel.ORT_DISABLE_ALL


def identity(options: Options) -> Mapping[str, str]:
    """All that an optimised graph depends on besides the graph: the engine, the machine, the settings."""
    onnxruntime = private.onnxruntime()
    return {
        "onnxruntime": f"{onnxruntime.__version__} {onnxruntime.get_build_info()}",
        # Optimised layouts depend on the width of the vectors: on another processor they would be wrong.
        "machine": processor_features(),
        "deterministic": str(options.deterministic),
        "providers": json.dumps(session_providers(options.providers)),
    }
