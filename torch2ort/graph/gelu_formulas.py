"""GELU: a node of ONNX Runtime's in the graphs that torch2ort runs, ONNX's own operators in files.

ONNX has a GELU operator from opset 20. A formula that is complete when a file is loaded becomes a
node again: ONNX Runtime's own fusions are off in torch2ort's sessions, as they use 1.4142 as the root of 2.
"""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from torch2ort.graph.exact_nodes import GELU_META
from torch2ort.graph.graph_traversal import graphs_in, opset_of, values_read

_OPSET = 20
_DOMAIN = "com.microsoft"
_GELU, _TANH_GELU = "Gelu", "FastGelu"


def gelus_as_formulas(model: onnx.ModelProto) -> None:
    """Replace marked nodes by operators of ONNX."""
    opset = opset_of(model)
    for graph in graphs_in(model.graph):
        nodes = [part for n in graph.node for part in (_formula(n, opset) if is_gelu(n) else [n])]
        del graph.node[:]
        graph.node.extend(nodes)


def formulas_as_gelus(model: onnx.ModelProto) -> None:
    """Replace the formulas that :func:`gelus_as_formulas` wrote by nodes, if they are still complete."""
    opset = opset_of(model)
    for graph in graphs_in(model.graph):
        if not any(_mark(node) for node in graph.node):
            continue
        producers = {node.output[0]: node for node in graph.node if node.output}
        readers = list(values_read(graph))
        joined: dict[str, onnx.NodeProto] = {}
        inner: set[str] = set()
        for node in graph.node:
            gelu = _gelu_of(node)
            if gelu is None:
                continue
            written = _formula(gelu, opset)
            names = [part.output[0] for part in written]
            is_whole = all(
                n in producers and _is_same(producers[n], p) for n, p in zip(names, written, strict=True)
            )
            # No other node may read the inner values.
            reads = sum(name in names for part in written for name in part.input)
            if is_whole and reads == sum(readers.count(name) for name in names[:-1]):
                joined[names[-1]] = gelu
                inner.update(names[:-1])
        nodes = [joined.get(n.output[0], n) for n in graph.node if n.output and n.output[0] not in inner]
        if joined:
            del graph.node[:]
            graph.node.extend(nodes)


def is_gelu(node: onnx.NodeProto) -> bool:
    """Return True if files contain the formula of a node in its place."""
    return node.domain == _DOMAIN and node.op_type in (_GELU, _TANH_GELU) and _mark(node) is not None


def _gelu_of(node: onnx.NodeProto) -> onnx.NodeProto | None:
    """Return the GELU node described by the mark on the last node of a formula; ``None`` for other nodes."""
    operator, _, rest = (_mark(node) or "").partition(" ")
    element, _, source = rest.partition(" ")
    if operator not in (_GELU, _TANH_GELU) or not source:
        return None
    gelu = helper.make_node(operator, [source], [node.output[0]], name=node.name, domain=_DOMAIN)
    gelu.metadata_props.extend(prop for prop in node.metadata_props if prop.key != GELU_META)
    gelu.metadata_props.add(key=GELU_META, value=element)
    return gelu


def _formula(node: onnx.NodeProto, opset: int) -> list[onnx.NodeProto]:
    """Return the nodes of ONNX that compute a GELU node; below opset 20 they compute in float32."""
    element, source, result = _mark(node), node.input[0], node.output[0]
    made: list[onnx.NodeProto] = []

    def add(operator: str, *inputs: str) -> str:
        name = f"{result}/{len(made)}_{operator}"
        made.append(helper.make_node(operator, inputs, [name], name=name))
        return name

    def number(value: float) -> str:
        name = f"{result}/{len(made)}_number"
        tensor = numpy_helper.from_array(np.array(value, np.float32))
        made.append(helper.make_node("Constant", [], [name], name=name, value=tensor))
        return name

    if opset >= _OPSET:
        add("Gelu", source)
        if node.op_type == _TANH_GELU:
            made[-1].attribute.append(helper.make_attribute("approximate", "tanh"))
    else:
        x = source
        if element != "FLOAT":
            x = add("Cast", source)
            made[-1].attribute.append(helper.make_attribute("to", TensorProto.FLOAT))
        # The order of operators and inputs is the one that ONNX Runtime's fusions match.
        if node.op_type == _GELU:
            bounded = add("Erf", add("Div", x, number(math.sqrt(2))))
            product = add("Mul", add("Mul", x, add("Add", bounded, number(1))), number(0.5))
        else:
            cubed = add("Mul", add("Pow", x, number(3)), number(0.044715))
            bounded = add("Tanh", add("Mul", add("Add", x, cubed), number(math.sqrt(2 / math.pi))))
            product = add("Mul", add("Mul", x, number(0.5)), add("Add", bounded, number(1)))
        if element != "FLOAT":
            add("CastLike", product, source)
    last = made[-1]
    last.output[0], last.name = result, node.name
    last.metadata_props.extend(prop for prop in node.metadata_props if prop.key != GELU_META)
    last.metadata_props.add(key=GELU_META, value=f"{node.op_type} {element} {source}")
    return made


def _is_same(one: onnx.NodeProto, other: onnx.NodeProto) -> bool:
    """Return True if two nodes compute the same from the same inputs."""
    fields = ("op_type", "domain", "input", "output", "attribute")
    return all(getattr(one, field) == getattr(other, field) for field in fields)


def _mark(node: onnx.NodeProto) -> str | None:
    return next((prop.value for prop in node.metadata_props if prop.key == GELU_META), None)
