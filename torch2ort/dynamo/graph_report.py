"""The report's description of a compiled graph: its operators, kernels and Functions."""

from __future__ import annotations

import collections

import torch

from torch2ort.dynamo.compile_cache import Obtained
from torch2ort.dynamo.report import CompiledGraph, CompiledHalf
from torch2ort.kernels.functions import AtenKernel, decode_call, decode_library_call
from torch2ort.kernels.library import LibraryKernel
from torch2ort.pythonop import Site


def described_graph(graph_module: torch.fx.GraphModule) -> CompiledGraph:
    """Describe a graph of dynamo: the line where it ends, and the reason."""
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    if reason is None:
        return CompiledGraph("", None)
    frame = reason.user_stack[-1] if reason.user_stack else None
    place = "" if frame is None else f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return CompiledGraph(place, str(reason.reason).partition("\n")[0] if reason.graph_break else None)


def described_half(kind: str, obtained: Obtained) -> CompiledHalf:
    """Describe a half of a graph: its operators, kernels and Functions."""
    lowered = obtained.lowered
    sites = {**lowered.calls, **lowered.derivatives}
    operators = (node.op_type for node in lowered.proto.graph.node if node.name not in sites)
    kernels = (_kernel(site) for site in sites.values() if site.internal)
    functions = (site.func_name for site in sites.values() if not site.internal)
    return CompiledHalf(
        kind,
        collections.Counter(name for name in operators if name != "Constant"),
        collections.Counter(kernels),
        collections.Counter(functions),
        obtained.cached,
        obtained.bypass_reason,
    )


def _kernel(site: Site) -> str:
    if site.function is LibraryKernel:
        return str(decode_library_call(str(site.arguments[0])).operator.name())
    if site.function is AtenKernel:
        return str(decode_call(str(site.arguments[0])).operator.name())
    return site.func_name.rpartition(".")[2]
