"""Calls of Functions with a body in the file: nodes named after the Function, and local functions.

The domain of a node is the Function's module, and its operator the Function's qualified name. Its attributes
are the call's arguments for other readers of the file, with floats of 32 bits; its metadata contains the
exact ones. In a graph that sessions run, the bodies replace the nodes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import onnx
from onnx import helper, inliner

from torch2ort.errors import FunctionNotFoundError, ModelLoadError
from torch2ort.graph.graph_traversal import CALL_META, text_of_call
from torch2ort.pythonop import Site, dump_site, load_site, node_attributes, qualified_name


def call_text(site: Site) -> str:
    """Return the metadata of the node of a call."""
    return json.dumps({"func_name": site.func_name, "site": dump_site(site)})


def function_calls(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Return the nodes of calls, in order."""
    return [node for node in model.graph.node if text_of_call(node)]


def called(node: onnx.NodeProto) -> Site:
    """Return the call of a node, not yet bound to a class.

    Raises:
        ModelLoadError: its metadata is damaged.
    """
    try:
        data = json.loads(text_of_call(node))
        site = load_site(str(data["func_name"]), str(data["site"]))
        counts = len(site.tensor_positions), len(site.known_result.tensors)
        if counts != (len(node.input), len(node.output)):
            raise ValueError(f"{counts[0]} tensors and {counts[1]} results")
        return site
    except (ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(
            f"the metadata '{CALL_META}' of its node '{node.name}' is damaged ({error})"
        ) from None


def inline_bodies(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of the model in which bodies replace calls; the model itself if it has no bodies."""
    if not model.functions:
        return model
    # The inliner gets a model without weights, so that they are copied only once.
    graph = onnx.GraphProto(name=model.graph.name, input=model.graph.input, output=model.graph.output)
    graph.node.extend(model.graph.node)
    known = {value.name for value in model.graph.input}
    graph.input.extend(
        onnx.ValueInfoProto(name=t.name) for t in model.graph.initializer if t.name not in known
    )
    light = helper.make_model(graph, opset_imports=model.opset_import, functions=model.functions)
    light.ir_version = model.ir_version
    found = inliner.inline_local_functions(light)
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for field, nodes in (
        (made.graph.node, found.graph.node),
        (made.functions, ()),
        (made.opset_import, found.opset_import),
    ):
        del field[:]
        field.extend(nodes)
    return made


def call_classes(model: onnx.ModelProto, functions: Iterable[type]) -> None:
    """Replace calls of some Functions by PythonOp nodes, in place.

    Args:
        model: a portable model.
        functions: the classes.

    Raises:
        FunctionNotFoundError: the model does not call one of them.
        ModelLoadError: the metadata of a node is damaged.
    """
    names = dict.fromkeys(map(qualified_name, functions))
    sites = {i: called(node) for i, node in enumerate(model.graph.node) if text_of_call(node)}
    has = dict.fromkeys(site.func_name.partition("#")[0] for site in sites.values())
    missing = [name for name in names if name not in has]
    if missing:
        raise FunctionNotFoundError(
            f"the model is portable and does not call {', '.join(missing)}. It calls "
            f"{', '.join(has) or 'no Function'}; leave out the classes that it does not call"
        )
    chosen = {i: site for i, site in sites.items() if site.func_name.partition("#")[0] in names}
    for count, (i, site) in enumerate(chosen.items()):
        node = model.graph.node[i]
        node.CopyFrom(_python_op(node, site, f"PythonOp_{count}"))
    used = {(node.domain, node.op_type) for node in model.graph.node}
    for function in [f for f in model.functions if (f.domain, f.name) not in used]:
        model.functions.remove(function)


def each_body(model: onnx.ModelProto, change: Callable[[onnx.ModelProto], None]) -> None:
    """Apply ``change`` to each body, as the graph of a separate model."""
    for function in model.functions:
        body = helper.make_model(
            helper.make_graph(
                function.node,
                function.name,
                [onnx.ValueInfoProto(name=name) for name in function.input],
                [onnx.ValueInfoProto(name=name) for name in function.output],
            ),
            opset_imports=function.opset_import,
        )
        change(body)
        del function.node[:]
        function.node.extend(body.graph.node)
        del function.opset_import[:]
        used = {"", *(node.domain for node in function.node)}
        function.opset_import.extend(entry for entry in body.opset_import if entry.domain in used)


def attributes_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call as attributes; those that are ``None`` are left out.

    Args:
        parameters: name -> value.
    """
    found = {name: _attribute(value) for name, value in parameters.items()}
    return {name: value for name, value in found.items() if value is not None}


def _attribute(value: Any) -> Any:
    if value is None or isinstance(value, (float, str)):
        return value
    if isinstance(value, (bool, int)) and -(1 << 63) <= value < 1 << 63:
        return int(value)
    if isinstance(value, (list, tuple)) and value:
        if all(isinstance(v, (bool, int)) for v in value):
            return [int(v) for v in value]
        if all(isinstance(v, (bool, int, float)) for v in value):
            return [float(v) for v in value]
        if all(isinstance(v, str) for v in value):
            return list(value)
    return str(value).removeprefix("torch.")


def _python_op(node: onnx.NodeProto, site: Site, name: str) -> onnx.NodeProto:
    attributes = node_attributes(site)
    # The first output is the context of the call.
    made = helper.make_node(
        "PythonOp", node.input, [f"{name}_context", *node.output], name, domain="com.microsoft", **attributes
    )
    made.metadata_props.extend(prop for prop in node.metadata_props if prop.key != CALL_META)
    return made
