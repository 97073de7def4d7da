"""Nodes for which a session of torch2ort's computes as eager PyTorch what ONNX Runtime computes otherwise."""

from __future__ import annotations

import onnx

from torch2ort.graph.graph_traversal import graphs_in

# Where a node says so; a plain session does without.
EXACT_META = "torch2ort.exact"
# NaN in a window of a pool is its result.
NAN = "nan"


def is_exact(node: onnx.NodeProto, kind: str) -> bool:
    """Whether a node is marked with this kind."""
    return any(prop.key == EXACT_META and prop.value == kind for prop in node.metadata_props)


def exact_nodes(graph: onnx.GraphProto) -> list[str]:
    """Names of all nodes that are marked, those of bodies included, in order."""
    nodes = [node for part in graphs_in(graph) for node in part.node]
    return [n.name for n in nodes if any(prop.key == EXACT_META for prop in n.metadata_props)]
