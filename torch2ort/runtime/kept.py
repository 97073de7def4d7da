"""Inference sessions over graphs that an earlier process optimised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx

from torch2ort.cache import Kept, Shelf
from torch2ort.runtime import _ort_private as private
from torch2ort.runtime.binding import bind_nodes, bind_sites, rename_functions
from torch2ort.runtime.graph import Graph
from torch2ort.runtime.inplace import InplacePlan, plan_inplace
from torch2ort.runtime.optimized import MODEL_FILE, optimize, run_as_it_is
from torch2ort.runtime.session import make_session


def can_keep(graph: Graph) -> bool:
    """Whether the optimised graph serves any process: it holds no weights, and names say what it calls."""
    return bool(graph.weights) and (private.has_training() or not graph.sites)


def kept_session(graph: Graph, settings: Any, identity: Mapping[str, str], shelf: Shelf) -> Any:
    """A session over ``graph`` out of the cache, or optimised and put there.

    Args:
        graph: the exported graph; see :func:`can_keep`.
        settings: ``SessionOptions``; may be changed.
        identity: engine, machine and settings, on which the optimised graph depends.
        shelf: the graph's place in the cache.

    Raises:
        EngineError: onnxruntime refuses the model.
    """

    def make() -> Kept:
        model = onnx.ModelProto()
        model.CopyFrom(graph.proto)
        plans = plan_inplace(model.graph, graph.sites, graph.fetches)
        bind_nodes(model.graph, graph.sites, {name: name for name in graph.sites}, training=False)
        content: bytes = model.SerializeToString()
        functions = _functions(graph, plans)[0]
        optimized = optimize(rename_functions(content, functions), settings)
        if optimized is not None:
            content = rename_functions(optimized, {key: name for name, key in functions.items()})
        inplace = {name: plan.description() for name, plan in plans.items()}
        return Kept({"optimized": optimized is not None, "inplace": inplace}, {MODEL_FILE: content})

    kept = shelf.obtain("inference graph", identity, make)
    if kept.data["optimized"]:
        run_as_it_is(settings)
    plans = {name: InplacePlan.of(plan) for name, plan in kept.data["inplace"].items()}
    functions, sites = _functions(graph, plans)
    return make_session(rename_functions(kept.files[MODEL_FILE], functions), sites, settings)


def _functions(graph: Graph, plans: Mapping[str, InplacePlan]) -> tuple[dict[str, str], list[Any]]:
    """The ``func_name`` that reaches each PythonOp node's site, and the native sites."""
    if not graph.sites:
        return {}, []
    sites = bind_sites(graph.sites, plans, training=False)
    return {name: site.key for name, site in sites.items()}, list(sites.values())
