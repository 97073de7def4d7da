"""Separation of recurrent nets with dropout into a net for each layer, and a dropout between two layers."""

from __future__ import annotations

import operator

import torch

from torch2ort.kernels.recurrent import is_recurrent
from torch2ort.program.fx_insert import insert_call, replace_call
from torch2ort.program.kernel_sites import arguments_of, is_random

aten = torch.ops.aten


def separate_layers(graph: torch.fx.Graph) -> None:
    """Replace each recurrent net that draws random numbers by its layers, which ONNX has operators for.

    PyTorch's kernels compute the layers one after the other, too, and draw numbers for the output of each
    layer except the last; the output's first dimension is the time.

    Args:
        graph: a program's nodes, changed in place.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and is_recurrent(node.target) and is_random(node):
            replace_call(node, _layer_by_layer(node))


def _layer_by_layer(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the net's output and the last states of its layers."""
    given = arguments_of(node)
    layers, p, first = given["num_layers"], given["dropout"], given["batch_first"]
    directions = 2 if given["bidirectional"] else 1
    weights = given["params"]
    each = len(weights) // layers
    has_several = isinstance(given["hx"], (list, tuple))
    states = given["hx"] if has_several else [given["hx"]]
    others = {name: given[name] for name in ("autocast", "onednn") if name in given}
    sequence = insert_call(node, aten.transpose.int, given["input"], 0, 1) if first else given["input"]
    ends: list[list[torch.fx.Node]] = [[] for _ in states]
    for layer in range(layers):
        begins = [
            insert_call(node, aten.slice.Tensor, state, 0, layer * directions, (layer + 1) * directions)
            for state in states
        ]
        own = list(weights[layer * each : (layer + 1) * each])
        begin = begins if has_several else begins[0]
        settings = (given["has_biases"], 1, 0.0, True, given["bidirectional"], False)
        made = insert_call(node, node.target, sequence, begin, own, *settings, **others)
        sequence, *last = (insert_call(node, operator.getitem, made, i) for i in range(1 + len(states)))
        for found, state in zip(ends, last, strict=True):
            found.append(state)
        if layer + 1 < layers:
            sequence = insert_call(node, aten.dropout.default, sequence, p, True)
    output = insert_call(node, aten.transpose.int, sequence, 0, 1) if first else sequence
    return [output, *(insert_call(node, aten.cat.default, found) for found in ends)]
