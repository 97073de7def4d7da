"""Functions that give bools, for onnxruntime-training's kernel."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from torch2ort.pythonop import Site


def cast_bools(graph: onnx.GraphProto, sites: Mapping[str, Site]) -> None:
    """Let PythonOps give bytes where their Functions give bools, and make bools of those, in place.

    The kernel reads DLPack's form without a bool. What it takes in is typed as bytes, whatever its graph
    says, and Not, Concat and GatherElements refuse that.

    Args:
        graph: a session's copy of an exported graph, its PythonOp nodes bound.
        sites: the site of each PythonOp node, by node name.
    """
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        nodes.append(node)
        if node.name not in sites:
            continue
        types = next(a for a in node.attribute if a.name == "output_tensor_types").ints
        for i, name in enumerate(node.output[1:]):  # the first one is the context's address
            if types[i] == onnx.TensorProto.BOOL:
                types[i] = onnx.TensorProto.UINT8
                node.output[1 + i] = f"{name}_bytes"
                nodes.append(
                    onnx.helper.make_node("Cast", [node.output[1 + i]], [name], to=onnx.TensorProto.BOOL)
                )
    del graph.node[:]
    graph.node.extend(nodes)
