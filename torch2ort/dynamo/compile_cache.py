"""Graphs of torch.compile in the export cache: the FX graph is the key, its ONNX translation is the value.

dynamo and AOTAutograd trace in each process, Functions included. So a cached graph calls the sites of this
process, which equal those with which the graph was translated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx
import torch

from torch2ort._torch import dynamo as private
from torch2ort.autotune.calibration import in_kernels
from torch2ort.cache.key.key import Key, Unkeyable, code_components, surroundings
from torch2ort.cache.store.graph_entries import EntryContent, GraphEntries
from torch2ort.cache.store.location import opened_store
from torch2ort.cache.store.store import RefusedError
from torch2ort.dynamo.fx_text import WrittenGraph
from torch2ort.errors import ModelLoadError
from torch2ort.graph.function_classes import bind_classes
from torch2ort.graph.graph_traversal import python_op_nodes
from torch2ort.graph.lowered_graph import Lowered
from torch2ort.log import logger
from torch2ort.options import Options
from torch2ort.pythonop import Site, load_node
from torch2ort.runtime.optimized_model import identity
from torch2ort.sizes.unbacked_sizes import conditions
from torch2ort.support.startup_timing import LOOK_UP, phase
from torch2ort.symbolics.registered import user_operators

_FILE = "graph.onnx"


@dataclass(frozen=True)
class Obtained:
    """A graph as ONNX.

    Attributes:
        lowered: the ONNX, and the sites that its nodes call.
        cached: True if it was read from the export cache.
        bypass_reason: the reason why the cache does not store it; ``None`` if it does, or there is no cache.
    """

    lowered: Lowered
    cached: bool = False
    bypass_reason: str | None = None


def kept_or_lowered(
    graph: torch.fx.Graph, opset: int, options: Options, lower: Callable[[], Lowered]
) -> Obtained:
    """Return a graph as ONNX, read from the export cache, or lowered and stored there.

    Args:
        graph: a graph of tensors.
        opset: the ONNX opset.
        options: contain the cache's folder.
        lower: translates the graph to ONNX.
    """
    made: list[Lowered] = []
    try:
        store = opened_store(options)
        if store is None:
            return Obtained(lower())
        if options.save_onnx_dir is not None:
            return Obtained(lower(), bypass_reason="save_onnx_dir asks for the graph of every stage")
        with phase(LOOK_UP):
            written = WrittenGraph(graph)
            graph_entries = GraphEntries(store, _key(graph, written, opset, options))

        def make() -> EntryContent:
            known = conditions(graph)
            made.append(lower())
            if conditions(graph) != known:
                raise Unkeyable("its translation is valid for only some of the sizes that vary")
            return _packed(made[0], written.sites)

        kept = graph_entries.obtain("graph of torch.compile", {}, make)
        return Obtained(made[0]) if made else Obtained(_unpacked(kept, written.sites), cached=True)
    except (RefusedError, Unkeyable) as error:
        reason = str(error)
    except ModelLoadError as error:
        reason = f"the cached graph does not match this process: {error}"
    logger.info("the graph of torch.compile is not cached: %s", reason)
    return Obtained(made[0] if made else lower(), bypass_reason=reason)


def _key(graph: torch.fx.Graph, written: WrittenGraph, opset: int, options: Options) -> Key:
    functions = dict.fromkeys(
        site.function for site in written.sites if site.function is not None and not site.internal
    )
    components = {
        **{name: str(value) for name, value in surroundings().items()},
        **identity(options),
        "in kernels": json.dumps(sorted(in_kernels(options))),
        # Without registrations and kept Functions, the graph calls no code of the user.
        **(code_components(functions) if functions or user_operators() else {}),
        "opset": str(opset),
        "sizes": json.dumps(private.known_of_sizes(graph)),
        "graph": written.text,
    }
    return Key.of("torch.compile", components)


def _packed(lowered: Lowered, sites: Sequence[Site]) -> EntryContent:
    data = {
        "calls": _numbers(lowered.calls, sites),
        "derivatives": _numbers(lowered.derivatives, sites),
    }
    if len(data["derivatives"]) < len(lowered.derivatives):
        raise Unkeyable("it has the derivative of a call that it does not contain")
    return EntryContent(data, {_FILE: lowered.proto.SerializeToString()})


def _numbers(nodes: Mapping[str, Site], sites: Sequence[Site]) -> dict[str, int]:
    """Map each node that calls one of a graph's sites to the site's number, without internal kernels."""
    return {name: sites.index(site) for name, site in nodes.items() if site in sites}


def _unpacked(kept: EntryContent, sites: Sequence[Site]) -> Lowered:
    proto = onnx.load_from_string(kept.files[_FILE])
    numbers: Mapping[str, int] = kept.data["calls"]
    nodes = [node for node in python_op_nodes(proto.graph) if node.name not in numbers]
    kernels = {node.name: load_node(node) for node in nodes}
    bind_classes(kernels.values())
    calls = {**kernels, **{name: sites[number] for name, number in numbers.items()}}
    return Lowered(proto, calls, {name: sites[number] for name, number in kept.data["derivatives"].items()})
