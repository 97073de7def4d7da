"""Nodes of ONNX that draw random numbers; a session of torch2ort calls eager PyTorch's kernels instead."""

from __future__ import annotations

import json
from collections.abc import Mapping

import onnx

from torch2ort.errors import ModelLoadError
from torch2ort.graph.function_classes import bind_classes
from torch2ort.kernels.functions import Bernoulli, Dropout
from torch2ort.pythonop import Site, dump_site, load_site

# Metadata of such a node: the call that draws eager PyTorch's numbers. A plain session draws its own.
DRAWN_META = "torch2ort.drawn"
_FUNCTIONS = (Bernoulli, Dropout)


def described_draw(site: Site) -> str:
    """Return the text that :func:`drawn_sites` reads."""
    return json.dumps([site.func_name, dump_site(site)])


def drawn_sites(graph: onnx.GraphProto) -> dict[str, Site]:
    """Return the site of each such node, by the node's name.

    Raises:
        ModelLoadError: a node's metadata is damaged, or its call does not draw random numbers.
    """
    sites = {}
    for node in graph.node:
        text = next((p.value for p in node.metadata_props if p.key == DRAWN_META), None)
        if text is None:
            continue
        try:
            name, described = json.loads(text)
            site = load_site(name, described)
            bind_classes([site])
        except (ValueError, TypeError) as error:
            raise ModelLoadError(
                f"node '{node.name}': its metadata '{DRAWN_META}' is damaged ({error})"
            ) from error
        if site.function not in _FUNCTIONS or len(site.tensor_positions) != 1:
            raise ModelLoadError(f"node '{node.name}': {name} does not draw random numbers")
        sites[node.name] = site
    return sites


def has_side_effects(site: Site) -> bool:
    """Return True if a call draws random numbers or has side effects: the order of such calls is kept."""
    return site.known_result.uses_rng or site.known_result.effects


def order_of_draws(graph: onnx.GraphProto, sites: Mapping[str, Site]) -> list[str]:
    """Return the names of the nodes that may draw eager PyTorch's numbers, in the order of the draws.

    Args:
        graph: the nodes.
        sites: the site of each PythonOp node, by node name.

    Returns:
        An empty list if no node of ONNX is among them: dependencies between the calls then keep their order.
    """
    drawn = drawn_sites(graph)
    if not drawn:
        return []
    return [
        n.name for n in graph.node if n.name in drawn or (n.name in sites and has_side_effects(sites[n.name]))
    ]
