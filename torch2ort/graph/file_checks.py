"""Checks that the parts of a file are consistent, before anything runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import onnx

from torch2ort.errors import ModelLoadError
from torch2ort.graph.accepted_sizes import Sizes
from torch2ort.graph.exact_nodes import exact_nodes
from torch2ort.graph.function_calls import function_calls
from torch2ort.graph.graph import Graph
from torch2ort.graph.random_nodes import order_of_draws
from torch2ort.graph.refinements import is_refinement
from torch2ort.io_schema import Schema

# PythonOpGrad occurs only in a session's graph; calls of Functions and kernels only in the main graph.
_CALLS = frozenset(
    {("com.microsoft", "PythonOp"), ("com.microsoft", "PythonOpGrad"), ("org.pytorch.aten", "ATen")}
)


def check_functions(model: onnx.ModelProto) -> None:
    """Refuse calls of Functions in places where their sites are not loaded.

    Raises:
        ModelLoadError: there is such a call; names the place.
    """
    for function in model.functions:
        for node in _all_nodes(function.node):
            if (node.domain, node.op_type) in _CALLS:
                raise ModelLoadError(
                    f"its local function '{function.name}' holds the {node.op_type} node '{node.name}', but "
                    f"calls of Functions belong in the graph; inline the function"
                )
    for node in _all_nodes(model.graph.node):
        if (node.domain, node.op_type) == ("com.microsoft", "PythonOpGrad") or is_refinement(node):
            raise ModelLoadError(
                f"it holds the {node.op_type} node '{node.name}', which only a session of torch2ort makes"
            )


def _all_nodes(nodes: Sequence[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield the nodes, including those of bodies."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from _all_nodes(body.node)


def check_interface(
    graph: Graph, inputs: Schema, outputs: Schema, sizes: Sizes, returned: Sequence[tuple[int, int]]
) -> None:
    """Compare a graph with its file's description of how to call it.

    Raises:
        ModelLoadError: they differ; names what was found and what was expected.
    """
    proto = graph.proto.graph
    # State was removed from the initializers; it is fed in addition to the inputs of the call.
    weights = {*graph.weights, *(tensor.name for tensor in proto.initializer)}
    given = [value.name for value in proto.input if value.name not in weights]
    _same("graph_inputs", list(graph.inputs), "the graph's inputs", given)
    _same(
        "graph_outputs and mutations",
        list(graph.fetches),
        "the graph's outputs",
        [o.name for o in proto.output],
    )
    _same("inputs", len(inputs.leaves), "the number of the graph's inputs", len(graph.inputs))
    _same("outputs", len(outputs.leaves), "the number of the graph's outputs", len(graph.outputs))
    ranks = [leaf.rank for leaf in inputs.leaves]
    _same("dims", [len(dims) for dims in sizes.dims], "the ranks of the inputs", ranks)
    for dims in sizes.dims:
        for size in dims:
            if type(size) is not str and (type(size) is not int or size < 0):
                raise _damaged("dims", size, "a size or its name", "0 or more")
    for name, (low, high) in sizes.ranges.items():
        if type(low) is not int or type(high) not in (int, type(None)):
            raise _damaged("ranges", {name: [low, high]}, "two sizes", "[int, int or null]")
    for pair in returned:
        for number, caches in zip(pair, (outputs.cache_count, inputs.cache_count), strict=True):
            if not 0 <= number < caches:
                raise _damaged("returned", list(pair), "numbers of caches below", caches)
    for mutation in graph.mutations:
        if mutation.kind not in ("buffer", "input"):
            raise _damaged("mutations", mutation.kind, "what is written to", "'buffer' or 'input'")
        if mutation.kind == "input" and mutation.target not in graph.inputs:
            raise _damaged("mutations", mutation.target, "an input", list(graph.inputs))


def check_draws(graph: Graph, saved: Sequence[str]) -> None:
    """Compare a graph with its file's list of the nodes that draw eager PyTorch's random numbers.

    Raises:
        ModelLoadError: nodes are missing, or are in another order.
    """
    found = order_of_draws(graph.proto.graph, graph.sites)
    if found != saved:
        raise ModelLoadError(
            f"its nodes that draw eager's random numbers are {_short(found)}, and were {_short(saved)} when "
            f"it was saved: it was changed by another tool. Export the model again, or open it in a plain "
            f"onnxruntime.InferenceSession, which draws numbers of its own"
        )


def check_exact(model: onnx.ModelProto, saved: Sequence[str]) -> None:
    """Compare a model with its file's list of the nodes that are exact in sessions of torch2ort.

    Raises:
        ModelLoadError: the lists differ.
    """
    found = exact_nodes(model)
    if found != saved:
        raise ModelLoadError(
            f"its nodes marked to run as in PyTorch are {_short(found)}, and were {_short(saved)} "
            f"when it was saved: it was changed by another tool. Export the model again, or open it in a "
            f"plain onnxruntime.InferenceSession, which computes them as ONNX Runtime does"
        )


def check_calls(model: onnx.ModelProto, saved: Sequence[str]) -> None:
    """Compare a model with its file's list of the calls that have a body.

    Raises:
        ModelLoadError: the lists differ.
    """
    found = [node.name for node in function_calls(model)]
    if found != saved:
        raise ModelLoadError(
            f"its calls of Functions are {_short(found)}, and were {_short(saved)} when it was saved: it was "
            f"changed by another tool. Export the model again, or open it in a plain "
            f"onnxruntime.InferenceSession, which runs the bodies that it has"
        )


def _same(name: str, given: Any, what: str, expected: Any) -> None:
    if given != expected:
        raise _damaged(name, given, what, expected)


def _damaged(name: str, given: Any, what: str, expected: Any) -> ModelLoadError:
    return ModelLoadError(
        f"its torch2ort metadata is damaged ('{name}' is {_short(given)}; expected {what}, "
        f"{_short(expected)})"
    )


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
