"""A session's copy of a graph that draws its random numbers as eager PyTorch, from its generator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx

from torch2ort.graph.graph import Graph
from torch2ort.graph.random_nodes import drawn_sites, has_side_effects
from torch2ort.pythonop import Site, node_attributes

_DOMAINS = ("com.microsoft", "org.pytorch.aten")


def drawing_as_eager(graph: Graph) -> Graph:
    """Return ``graph``, or a copy with such draws; see :func:`with_eager_draws`."""
    proto, sites = with_eager_draws(graph.proto, graph.sites)
    return graph if proto is graph.proto else replace(graph, proto=proto, sites=sites)


def with_eager_draws(
    model: onnx.ModelProto, sites: Mapping[str, Site]
) -> tuple[onnx.ModelProto, dict[str, Site]]:
    """Return ``model``, or a copy that calls PyTorch's random operators instead of ONNX's, and all its sites.

    Args:
        model: an exported model; it is not changed.
        sites: the site of each PythonOp node, by node name.

    Raises:
        ModelLoadError: the call that a node describes is damaged.
    """
    drawn = drawn_sites(model.graph)
    if not drawn:
        return model, dict(sites)
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for node in made.graph.node:
        if node.name in drawn:
            _call(node, drawn[node.name])
    imported = {entry.domain for entry in made.opset_import}
    made.opset_import.extend(onnx.helper.make_opsetid(name, 1) for name in _DOMAINS if name not in imported)
    called = {**sites, **drawn}
    _order(made, called)
    return made, called


def _call(node: onnx.NodeProto, site: Site) -> None:
    """Change a random operator into the call of a site, in place."""
    node.domain, node.op_type = "org.pytorch.aten", "ATen"
    del node.input[len(site.tensor_positions) :]
    outputs = [f"{node.output[0]}/context", *node.output]
    # An operator of ONNX omits trailing outputs that are unused.
    unread = range(len(outputs), 1 + len(site.known_result.tensors))
    node.output[:] = [*outputs, *(f"{node.output[0]}/{i}" for i in unread)]
    del node.attribute[:]
    attributes = node_attributes(site)
    node.attribute.extend(onnx.helper.make_attribute(*item) for item in attributes.items() if item[1] != [])


def _order(model: onnx.ModelProto, sites: Mapping[str, Site]) -> None:
    """Keep the calls in the order of the nodes, and make unused calls run, in place."""
    import onnx_ir as ir  # slow to import, and few graphs draw

    from torch2ort.program.effect_order import keep_order, keep_unused_calls

    # Without the weights, which may be large.
    bare = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    bare.graph.name = model.graph.name
    bare.graph.node.extend(model.graph.node)
    weights = (onnx.ValueInfoProto(name=tensor.name) for tensor in model.graph.initializer)
    given = {value.name: value for value in (*weights, *model.graph.input)}
    bare.graph.input.extend(given.values())
    bare.graph.output.extend(model.graph.output)
    graph = ir.from_proto(bare).graph
    keep_order(graph, {name for name, site in sites.items() if has_side_effects(site)})
    keep_unused_calls(graph, sites)
    nodes = ir.to_proto(graph).node
    del model.graph.node[:]
    model.graph.node.extend(nodes)
