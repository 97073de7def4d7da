"""Names of a graph's inputs, weights and outputs: those that the user gave."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir


def separate_outputs(graph: ir.Graph) -> None:
    """Give every graph output a node of its own: an input that is returned, or a value returned twice."""
    taken: set[int] = {id(value) for value in (*graph.inputs, *graph.initializers.values())}
    for position, value in enumerate(graph.outputs):
        if id(value) in taken:
            node = ir.node("Identity", [value])
            copy = node.outputs[0]
            copy.shape, copy.type = value.shape, value.type
            graph.append(node)
            graph.outputs[position] = copy
        taken.add(id(graph.outputs[position]))


def name_interface(graph: ir.Graph, inputs: Sequence[str], outputs: Sequence[str], prefix: str) -> None:
    """Rename the graph's inputs and outputs, and take ``prefix`` off its weights' names.

    Args:
        graph: its first inputs are the model's own, the rest are weights named ``prefix`` + name.
        inputs: wanted names of the model's own inputs, all different.
        outputs: wanted names of the first outputs.
        prefix: what tracing put in front of every weight's name. It stays where the short name is taken.
    """
    own, weights = graph.inputs[: len(inputs)], graph.inputs[len(inputs) :]
    wanted: dict[int, str] = {id(value): name for value, name in zip(own, inputs, strict=True)}
    taken = set(inputs)
    for value in weights:
        name = _free((value.name or "").removeprefix(prefix), taken, value.name or "weight")
        wanted[id(value)] = name
        taken.add(name)
    for value, name in zip(graph.outputs, outputs, strict=False):
        name = _free(name, taken, f"{name}_out")
        wanted[id(value)] = name
        taken.add(name)
    for value in _values(graph):
        if id(value) not in wanted and value.name in taken:
            value.name = _free(f"{value.name}_inner", taken, f"{value.name}_inner")
            taken.add(value.name)
    renamed = [value for value in (*graph.inputs, *graph.outputs) if id(value) in wanted]
    for value in renamed:
        value.name = wanted[id(value)]


def _values(graph: ir.Graph) -> list[ir.Value]:
    values = list(graph.initializers.values())
    for node in graph.all_nodes():
        values.extend(node.outputs)
    values.extend(graph.outputs)
    return values


def _free(name: str, taken: set[str], otherwise: str) -> str:
    if name not in taken:
        return name
    candidate, number = otherwise, 1
    while candidate in taken:
        number += 1
        candidate = f"{otherwise}_{number}"
    return candidate
