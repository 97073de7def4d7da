"""Functions that depend only on weights: a file contains their results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx
import torch

from torch2ort.graph.fold_weights import SUFFIX
from torch2ort.graph.graph import Graph
from torch2ort.graph.graph_traversal import ancestors, values_read
from torch2ort.options import Options
from torch2ort.pythonop import ONNX_TYPES
from torch2ort.runtime import InferenceEngine


def computed(
    graph: Graph, weights: Mapping[str, torch.Tensor], options: Options
) -> tuple[Graph, dict[str, torch.Tensor]]:
    """Return the graph with the current results of its PythonOps as weights.

    Args:
        graph: its PythonOps depend only on weights.
        weights: its weights.
        options: the number of threads.

    Returns:
        The graph, and its weights.
    """
    calls = calls_of_functions(graph)
    if not calls:
        return graph, dict(weights)
    results = [name for node in calls for name in node.output[1:] if name]
    known = ancestors(graph.proto.graph, results)
    nodes = [n for n in graph.proto.graph.node if not known.isdisjoint(n.output)]
    read = {name: origin for name, origin in graph.weights.items() if name in known}
    part = onnx.ModelProto()
    part.CopyFrom(graph.proto)
    kept = [value for value in part.graph.input if value.name in read]
    types = {v.name: v for v in (*part.graph.value_info, *part.graph.output)}
    outputs = [types.get(name, onnx.ValueInfoProto(name=name)) for name in results]
    for field, values in ((part.graph.node, nodes), (part.graph.input, kept), (part.graph.output, outputs)):
        del field[:]
        field.extend(values)
    names = {node.name for node in nodes}
    sites = {name: site for name, site in graph.sites.items() if name in names}
    inner = Graph(inputs=(), weights=read, outputs=tuple(results), mutations=(), proto=part, sites=sites)
    values = InferenceEngine(inner, options).run([weights[value.name] for value in kept])
    return _with_results(graph, weights, dict(zip(results, values, strict=True)))


def calls_of_functions(graph: Graph) -> list[onnx.NodeProto]:
    """Return the PythonOp nodes of a graph, without those of PyTorch's kernels."""
    users = {name for name, site in graph.sites.items() if not site.internal}
    return [node for node in graph.proto.graph.node if node.name in users]


def _with_results(
    graph: Graph, weights: Mapping[str, torch.Tensor], results: Mapping[str, torch.Tensor]
) -> tuple[Graph, dict[str, torch.Tensor]]:
    """Return the graph with results as weights in the place of the nodes that compute them."""
    proto = onnx.ModelProto()
    proto.CopyFrom(graph.proto)
    names: dict[str, str] = {}
    for result in results:
        found = ancestors(graph.proto.graph, [result])
        weight = next(name for name in graph.weights if name in found)
        name, count = f"{weight}{SUFFIX}", 1
        while name in graph.weights or name in names.values():
            count += 1
            name = f"{weight}{SUFFIX}_{count}"
        names[result] = name
    nodes = [n for n in proto.graph.node if results.keys().isdisjoint(n.output)]
    for node in nodes:
        node.input[:] = [names.get(name, name) for name in node.input]
    del proto.graph.node[:]
    proto.graph.node.extend(_read(proto.graph, nodes))
    read = set(values_read(proto.graph))
    made = {name for node in proto.graph.node for name in node.output}
    for value in [value for value in proto.graph.value_info if value.name not in made]:
        proto.graph.value_info.remove(value)
    unread = {name for name in graph.weights if name not in read}
    inputs = [value for value in proto.graph.input if value.name not in unread]
    inputs += [
        onnx.helper.make_tensor_value_info(names[result], ONNX_TYPES[value.dtype], list(value.shape))
        for result, value in results.items()
    ]
    del proto.graph.input[:]
    proto.graph.input.extend(inputs)
    values = {**weights, **{names[result]: value for result, value in results.items()}}
    left = {name: origin for name, origin in graph.weights.items() if name not in unread}
    left.update({name: name for name in names.values()})
    graph = replace(
        graph,
        proto=proto,
        weights=left,
        sites={n.name: graph.sites[n.name] for n in proto.graph.node if n.name in graph.sites},
    )
    return graph, {name: values[name] for name in left}


def _read(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return the nodes on which an output of the graph depends."""
    wanted = {value.name for value in graph.output}
    kept = []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.output):
            part = onnx.GraphProto(node=[node])
            wanted.update(values_read(part))
            kept.append(node)
    return kept[::-1]
