"""Registered gradients in a program that autograd differentiates.

A user registers the gradient of an ONNX operator. Where all operators that a call is translated to have
registered gradients, these are the call's derivative; any other call keeps PyTorch's, or its Function's own.
"""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from torch2ort import symbolics
from torch2ort._torch import aot as private
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.program.gradient_flow import carrying, is_float
from torch2ort.program.target import Target
from torch2ort.program.traced_program import TracedProgram
from torch2ort.pythonop import site_by_key
from torch2ort.pythonop.abstract_run.forward_probe import UserError
from torch2ort.pythonop.registry import exporter_of, gradients
from torch2ort.symbolics.python_op_nodes import SiteNodes
from torch2ort.symbolics.registered import translating
from torch2ort.symbolics.registered.user_gradient_ops import MAPPED_CALL, MappedCall

_PYTHON_OP = torch.ops.torch2ort.python_op.default
_KERNELS = frozenset({"PythonOp", "ATen"})


def map_calls(source: TracedProgram, required: Sequence[bool], target: Target) -> TracedProgram:
    """Replace the derivatives of a program's calls by those that users registered.

    Args:
        source: the traced program.
        required: for each of its inputs, whether a gradient is wanted.
        target: the target of graphs.

    Returns:
        The program, or a copy with such calls.

    Raises:
        ExportError: a registered function describes no gradient.
    """
    if not gradients.entries():
        return source
    program = copy.deepcopy(source.graph_module)
    graph = program.graph
    inputs = graph.find_nodes(op="placeholder")
    needed = set(carrying(graph, (node for node, r in zip(inputs, required, strict=True) if r)))
    calls = []
    for node in list(graph.nodes):
        if node in needed and _may_be_mapped(node):
            call = _mapped(node, needed, target)
            if call is not None and call.is_registered:
                needed.add(_replace(node, call))
                calls.append(call)
    if not calls:
        return source
    return replace(source, graph_module=program, sites=(*source.sites, *calls))


def _may_be_mapped(node: torch.fx.Node) -> bool:
    inputs = node.all_input_nodes
    if node.op != "call_function" or not all(isinstance(n.meta.get("val"), torch.Tensor) for n in inputs):
        return False
    if node.target is _PYTHON_OP:
        exporter = exporter_of(site_by_key(str(node.args[1])))
        return exporter is not None and exporter.gradient == "engine"
    if not isinstance(node.target, private.OpOverload) or node.target.namespace != "aten":
        return False
    schema = node.target._schema
    return not schema.is_mutable and all(r.alias_info is None for r in schema.returns)


def _mapped(node: torch.fx.Node, needed: set[torch.fx.Node], target: Target) -> MappedCall | None:
    """Return the translation of a call; ``None`` where it contains Python or PyTorch's kernels."""
    inputs = node.all_input_nodes
    graph = torch.fx.Graph()
    given = {n: graph.placeholder(n.name) for n in inputs}
    for source, placeholder in given.items():
        value = source.meta["val"].detach()
        placeholder.meta = {"val": value.requires_grad_(source in needed and is_float(value))}
    copied = graph.node_copy(node, given.__getitem__)
    outputs = list(_results(graph, copied))
    graph.output(tuple(outputs))
    program = private.program_of(private.graph_module(graph), list(given.values()), outputs)
    nodes = SiteNodes({}, target)
    with translating({}, target), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 copies its own deprecated tree specs
        try:
            prepared = symbolics.prepare(program, target)
            translated = symbolics.translate(prepared, target, python_op=nodes.translate)
        except UserError as carrier:
            raise carrier.error from None
        except UnsupportedOperatorError:
            return None
    model = translated.model
    if model.functions or any(n.op_type in _KERNELS for n in model.graph):
        return None

    called: Any = node.target
    arguments = (node.args, node.kwargs)

    def fake(tensors: Sequence[torch.Tensor]) -> Any:
        found = dict(zip(inputs, tensors, strict=True))
        args, kwargs = torch.fx.node.map_arg(arguments, found.__getitem__)
        return called(*args, **kwargs)

    return MappedCall(model, [n in needed and is_float(n.meta["val"]) for n in inputs], fake)


def _results(graph: torch.fx.Graph, node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield a node, or one node for each of the tensors that it computes."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        yield node
        return
    for i, part in enumerate(value):
        result = graph.call_function(operator.getitem, (node, i))
        result.meta = {**node.meta, "val": part}
        yield result


def _replace(node: torch.fx.Node, call: MappedCall) -> torch.fx.Node:
    """Replace ``node`` by a mapped call, and return the node of its result."""
    graph = node.graph
    single = isinstance(node.meta["val"], torch.Tensor)
    with graph.inserting_before(node):
        made = graph.call_function(MAPPED_CALL, (list(node.all_input_nodes), call.key))
        made.meta = {**node.meta, "val": [node.meta["val"]] if single else node.meta["val"]}
        result = made
        if single:
            result = graph.call_function(operator.getitem, (made, 0))
            result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return result
