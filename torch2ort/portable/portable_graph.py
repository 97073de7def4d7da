"""Conversion of a graph with PythonOps to one that contains the bodies of its calls of Functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx
import torch
from onnx import helper

from torch2ort.capture.sample_call import Call
from torch2ort.capture.trace import Trace, sample_calls
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.graph.file import refuse_unstorable
from torch2ort.graph.function_calls import attributes_of, call_text
from torch2ort.graph.graph import Graph
from torch2ort.graph.graph_traversal import CALL_META, ancestors
from torch2ort.graph.node_provenance import kernels_said
from torch2ort.graph.refinements import kernels_in_files
from torch2ort.options import Options
from torch2ort.portable.body import Body, body_of
from torch2ort.portable.comparison import compare
from torch2ort.portable.probe import probe
from torch2ort.portable.weight_functions import calls_of_functions
from torch2ort.program.target import Target
from torch2ort.pythonop import Site
from torch2ort.pythonop.abstract_run.sample_tensors import number_of
from torch2ort.runtime import InferenceEngine

# Operators whose results differ in each run.
_RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)


def portable(
    graph: Graph, model: torch.nn.Module, call: Call, traced: Trace, target: Target, options: Options
) -> Graph:
    """Replace each PythonOp by a node named after its Function, and add the bodies to the model.

    A call whose tensors depend only on weights stays; :func:`torch2ort.portable.weight_functions.computed`
    computes it.

    Args:
        graph: of a model in evaluation mode.
        model: the model.
        call: the sample call.
        traced: its trace.
        target: the target of the graph.
        options: the number of threads.

    Raises:
        ExportError: a Function has no body that computes the same.
        UnsupportedOperatorError: ONNX lacks an operator.
    """
    _refuse_kernels(graph)
    nodes = calls_of_functions(graph)
    calls = {node.name: node for node in nodes if not _is_of_weights_alone(graph, node)}
    if not calls:
        return replace(graph, portable=True)
    proto = onnx.ModelProto()
    proto.CopyFrom(graph.proto)
    functions = {site.function for site in map(graph.sites.__getitem__, calls) if site.function is not None}
    tensors = sample_calls(model, call, functions, training=target.training)
    symbolic = _symbolic(traced)
    bodies = _Bodies(proto, target, options)
    for node in proto.graph.node:
        if node.name in calls:
            site = graph.sites[node.name]
            assert site.function is not None
            bodies.give(node, site, tensors[site.function][number_of(site)], symbolic[site.key])
    contexts = {node.output[0] for node in calls.values()}
    for value in [value for value in proto.graph.value_info if value.name in contexts]:
        proto.graph.value_info.remove(value)
    return replace(
        graph, portable=True, proto=proto, sites={n: s for n, s in graph.sites.items() if n not in calls}
    )


def _is_of_weights_alone(graph: Graph, node: onnx.NodeProto) -> bool:
    """Return True if the tensors of a call depend on weights, but not on inputs, state or random numbers."""
    found = ancestors(graph.proto.graph, node.input)
    state = {mutation.target for mutation in graph.mutations}
    varying = {*graph.inputs, *(name for name, origin in graph.weights.items() if origin in state)}
    draws = any(n.op_type in _RANDOM for n in graph.proto.graph.node if not found.isdisjoint(n.output))
    return not draws and found.isdisjoint(varying) and not found.isdisjoint(graph.weights)


class _Bodies:
    """The bodies of a model.

    Args:
        proto: the model; changed in place.
        target: the target of the graph.
        options: the number of threads.
    """

    def __init__(self, proto: onnx.ModelProto, target: Target, options: Options) -> None:
        self._proto = proto
        self._target = replace(target, give_bodies=None)
        self._options = options
        self._traced: dict[object, tuple[Body, InferenceEngine]] = {}
        self._written: dict[type, list[onnx.FunctionProto]] = {}
        self._count = 0

    def give(
        self,
        node: onnx.NodeProto,
        site: Site,
        tensors: Sequence[torch.Tensor],
        traced: Sequence[torch.Tensor],
    ) -> None:
        """Turn the PythonOp of a call into a node with a body.

        Args:
            node: the PythonOp.
            site: the call.
            tensors: its tensors on the sample.
            traced: its tensors in the trace of the model.
        """
        refuse_unstorable(site)
        body = self._body(site, tensors, traced)
        function = self._function(site, body)
        parameters = {body.parameters[i]: value for i, value in site.constants.items()}
        made = helper.make_node(
            function.name,
            node.input,
            node.output[1:],
            f"{function.name}_{self._count}",
            domain=function.domain,
            **attributes_of(parameters),
        )
        self._count += 1
        made.metadata_props.extend(node.metadata_props)
        made.metadata_props.add(key=CALL_META, value=call_text(site))
        node.CopyFrom(made)

    def _body(self, site: Site, tensors: Sequence[torch.Tensor], traced: Sequence[torch.Tensor]) -> Body:
        types = [(a.dtype, [*a.shape], str(b.shape)) for a, b in zip(tensors, traced, strict=True)]
        key = (site.function, repr(site.arguments), str(types))
        if key not in self._traced:
            probe(site, tensors)
            body = body_of(site, tensors, traced, self._target)
            self._traced[key] = body, InferenceEngine(body.graph, self._options)
        body, engine = self._traced[key]
        compare(site, engine, tensors)
        return body

    def _function(self, site: Site, body: Body) -> onnx.FunctionProto:
        """Return the body in the model, named after the Function, with a number if the name is used."""
        assert site.function is not None
        made = _function(body, site)
        written = self._written.setdefault(site.function, [])
        for function in written:
            if _is_same(function, made):
                return function
        written.append(made)
        domain, name, count = site.function.__module__, site.function.__qualname__, 1
        names = {f.name for f in self._proto.functions if f.domain == domain}
        made.domain, made.name = domain, name
        while made.name in names:
            count += 1
            made.name = f"{name}__{count}"
        self._proto.functions.append(made)
        if all(entry.domain != domain for entry in self._proto.opset_import):
            self._proto.opset_import.append(helper.make_opsetid(domain, 1))
        return made


def _function(body: Body, site: Site) -> onnx.FunctionProto:
    """Return a body as a local function without a name."""
    graph = body.graph.proto.graph
    constants = [
        helper.make_node("Constant", [], [tensor.name], f"Constant_{tensor.name}", value=tensor)
        for tensor in graph.initializer
    ]
    domains = {"", *(node.domain for node in graph.node)}
    opsets = [entry for entry in body.graph.proto.opset_import if entry.domain in domains]
    parameters = {body.parameters[i]: value for i, value in site.constants.items()}
    return helper.make_function(
        "",
        "",
        [value.name for value in graph.input],
        [value.name for value in graph.output],
        [*constants, *graph.node],
        opsets,
        sorted(attributes_of(parameters)),
    )


def _is_same(one: onnx.FunctionProto, other: onnx.FunctionProto) -> bool:
    """Return True if two bodies have the same nodes, inputs, outputs and attributes, apart from metadata."""
    parts = []
    for function in (one, other):
        nodes = []
        for node in function.node:
            bare = onnx.NodeProto()
            bare.CopyFrom(node)
            del bare.metadata_props[:]
            bare.doc_string = ""
            nodes.append(bare.SerializeToString(deterministic=True))
        parts.append((nodes, [*function.input], [*function.output], [*function.attribute]))
    return parts[0] == parts[1]


def _symbolic(traced: Trace) -> dict[str, list[torch.Tensor]]:
    """Return the tensors of each call in a trace, by the key of its site."""
    nodes = traced.program.graph.find_nodes(op="call_function", target=torch.ops.torch2ort.python_op.default)
    return {str(node.args[1]): [given.meta["val"] for given in node.args[0]] for node in nodes}


def _refuse_kernels(graph: Graph) -> None:
    """Refuse a model that calls PyTorch's kernels.

    Raises:
        UnsupportedOperatorError: it calls some; names the operators, with their lines.
    """
    kernels = kernels_said(kernels_in_files(graph.proto.graph), graph.sites)
    if kernels:
        raise UnsupportedOperatorError(
            f"the model is not portable: ONNX has no operators for {kernels}. Write them with "
            f"others, register a translation with torch2ort.register_symbolic, or export without "
            f"portable=True"
        )
