"""Inference sessions over graphs that an earlier process optimised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch2ort.cache.store.graph_entries import Kept, Shelf
from torch2ort.graph.graph import Graph
from torch2ort.runtime.optimized_model import MODEL_FILE, optimize, run_as_it_is
from torch2ort.runtime.session import make_session
from torch2ort.runtime.workarounds import mended


def can_keep(graph: Graph) -> bool:
    """Whether the optimised graph serves any process: it holds no weights, and calls no Functions."""
    return bool(graph.weights) and not graph.sites


def kept_session(
    graph: Graph, settings: Any, providers: Sequence[Any], identity: Mapping[str, str], shelf: Shelf
) -> Any:
    """A session over ``graph`` out of the cache, or optimised and put there.

    Args:
        graph: the exported graph; see :func:`can_keep`.
        settings: ``SessionOptions``; may be changed.
        providers: as for ``InferenceSession``.
        identity: engine, machine and settings, on which the optimised graph depends.
        shelf: the graph's place in the cache.

    Raises:
        EngineError: onnxruntime refuses the model.
    """

    def make() -> Kept:
        content: bytes = mended(graph.proto).SerializeToString()
        optimized = optimize(content, settings, providers)
        data = {"optimized": optimized is not None}
        return Kept(data, {MODEL_FILE: content if optimized is None else optimized})

    kept = shelf.obtain("inference graph", identity, make)
    if kept.data["optimized"]:
        run_as_it_is(settings)
    return make_session(kept.files[MODEL_FILE], (), settings, providers)
