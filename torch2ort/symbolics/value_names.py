"""Assignment of the user's names to a graph's inputs, weights and outputs."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir


def separate_outputs(graph: ir.Graph) -> None:
    """Make each graph output a value of its own, also a returned input, or a value that is returned twice."""
    taken: set[int] = {id(value) for value in (*graph.inputs, *graph.initializers.values())}
    for position, value in enumerate(graph.outputs):
        if id(value) in taken:
            node = ir.node("Identity", [value])
            copy = node.outputs[0]
            copy.shape, copy.type = value.shape, value.type
            graph.append(node)
            graph.outputs[position] = copy
        taken.add(id(graph.outputs[position]))


def interface_names(
    inputs: Sequence[str], weights: Sequence[str], outputs: Sequence[str], prefix: str
) -> tuple[list[str], list[str]]:
    """Choose the names of a graph's weights and outputs, all different.

    Args:
        inputs: names of the model's own inputs, all different.
        weights: names of the weights, ``prefix`` + the model's name.
        outputs: wanted names of the outputs.
        prefix: the prefix of every weight's name in a trace. It is kept where the short name is taken.
    """
    taken = set(inputs)

    def free(name: str, otherwise: str) -> str:
        found = _free(name, taken, otherwise)
        taken.add(found)
        return found

    return [free(w.removeprefix(prefix), w) for w in weights], [free(o, f"{o}_out") for o in outputs]


def name_interface(graph: ir.Graph, inputs: Sequence[str], outputs: Sequence[str], prefix: str) -> None:
    """Rename the graph's inputs and outputs, and remove ``prefix`` from its weights' names.

    Args:
        graph: its first inputs are the model's own, the rest are weights named ``prefix`` + name.
        inputs: wanted names of the model's own inputs, all different.
        outputs: wanted names of the first outputs.
        prefix: as for :func:`interface_names`.
    """
    own, weights = graph.inputs[: len(inputs)], graph.inputs[len(inputs) :]
    names = interface_names(inputs, [value.name or "weight" for value in weights], outputs, prefix)
    wanted: dict[int, str] = {
        id(value): name
        for values, given in ((own, inputs), (weights, names[0]), (graph.outputs, names[1]))
        for value, name in zip(values, given, strict=False)
    }
    taken = set(wanted.values())
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
