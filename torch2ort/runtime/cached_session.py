"""Inference sessions over graphs that an earlier process optimised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx

from torch2ort.cache.store.shelf import Kept, Shelf
from torch2ort.graph.graph import Graph
from torch2ort.runtime import _ort_private as private
from torch2ort.runtime.binding import OriginalFeeds, bind_nodes, bind_sites, rename_functions
from torch2ort.runtime.chains import Chain, join_python_ops
from torch2ort.runtime.inplace import InplacePlan, plan_inplace
from torch2ort.runtime.mended import mended
from torch2ort.runtime.optimized import MODEL_FILE, optimize, run_as_it_is
from torch2ort.runtime.session import keep_results, make_session
from torch2ort.runtime.training_kernel.bools import cast_bools


def can_keep(graph: Graph) -> bool:
    """Whether the optimised graph serves any process: it holds no weights, and names say what it calls."""
    return bool(graph.weights) and (private.has_training() or not graph.sites)


def kept_session(
    graph: Graph,
    settings: Any,
    providers: Sequence[Any],
    identity: Mapping[str, str],
    shelf: Shelf,
    originals: OriginalFeeds | None = None,
) -> Any:
    """A session over ``graph`` out of the cache, or optimised and put there.

    Args:
        graph: the exported graph; see :func:`can_keep`.
        settings: ``SessionOptions``; may be changed.
        providers: as for ``InferenceSession``.
        identity: engine, machine and settings, on which the optimised graph depends.
        shelf: the graph's place in the cache.
        originals: see :func:`torch2ort.runtime.binding.original_feeds`.

    Raises:
        EngineError: onnxruntime refuses the model.
    """

    def make() -> Kept:
        model = onnx.ModelProto()
        model.CopyFrom(mended(graph.proto))
        plans = plan_inplace(model.graph, graph.sites, graph.fetches)
        bind_nodes(model.graph, graph.sites, training=False)
        cast_bools(model.graph, graph.sites)
        chains = join_python_ops(model.graph, graph.sites)
        content: bytes = model.SerializeToString()
        optimized = optimize(content, settings, providers)
        data = {
            "optimized": optimized is not None,
            "inplace": {name: plan.description() for name, plan in plans.items()},
            "chains": [chain.description() for chain in chains],
        }
        return Kept(data, {MODEL_FILE: content if optimized is None else optimized})

    kept = shelf.obtain("inference graph", identity, make)
    if kept.data["optimized"]:
        run_as_it_is(settings)
    model = kept.files[MODEL_FILE]
    if not graph.sites:
        return make_session(model, (), settings, providers)
    keep_results(settings)
    plans = {name: InplacePlan.of(plan) for name, plan in kept.data["inplace"].items()}
    chains = map(Chain.of, kept.data["chains"])
    bound = bind_sites(graph.sites, plans, chains, training=False, originals=originals)
    callees = list(bound.callees.values())
    return make_session(rename_functions(model, bound.functions), callees, settings, providers)
