"""What an export made of a model, for who develops: operators, and what stays in Python."""

from __future__ import annotations

from collections import Counter

from torch2ort.graph.graph import Graph
from torch2ort.graph.node_provenance import Origin


def report(graph: Graph) -> str:
    """A line per kind of operator with its count, then one per call of a Function or kernel of PyTorch's."""
    nodes = graph.proto.graph.node
    counts = Counter(f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in nodes)
    lines = [f"  {count:>5}  {name}" for name, count in counts.most_common()]
    for node in nodes:
        site = graph.sites.get(node.name)
        if site is not None:
            origin = Origin.of(node)
            where = f" ({origin.line})" if origin.line else ""
            lines.append(f"  {node.name} runs {site.func_name} in Python{where}")
    return "\n".join(lines)
