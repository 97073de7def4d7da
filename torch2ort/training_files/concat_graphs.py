"""Concatenation of two translated graphs: the second reads outputs of the first."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import onnx
import onnx_ir as ir

from torch2ort.training_files.arguments import input_taken, name_taken
from torch2ort.training_files.lowered_step import Part, named


def joined(
    first: Part, second: Part, connected: Mapping[str, str], shared: Collection[str] = ()
) -> onnx.ModelProto:
    """Join two graphs to one file.

    Args:
        first: the graph that runs first.
        second: the graph that runs after it.
        connected: input of ``second`` -> output of ``first`` that it reads, which is no output of the file.
        shared: inputs that both have.

    Raises:
        ExportError: the file is larger than protobuf allows, or inputs that are not shared have one name.
        OptionError: a metric, an output of the first, has the name of an output of the second.
    """
    model, other = first.model(), second.model()
    given = dict(zip(first.inputs, model.graph.inputs, strict=True))
    results = dict(zip(first.outputs, model.graph.outputs, strict=True))
    inputs, taken = list(first.inputs), list(other.graph.inputs)
    _rename(model.graph, other.graph)
    other.graph.inputs.clear()
    for name, value in zip(second.inputs, taken, strict=True):
        if name in connected:
            ir.convenience.replace_all_uses_with(value, results[connected[name]])
        elif name in shared:
            ir.convenience.replace_all_uses_with(value, given[name])
        elif name in given:
            raise input_taken(name)
        else:
            inputs.append(name)
            model.graph.inputs.append(value)
    outputs = [name for name in first.outputs if name not in set(connected.values())]
    for name in set(outputs) & set(second.outputs):
        raise name_taken(name)
    _move(other.graph, model.graph, [results[name] for name in outputs])
    return named(model, inputs, [*outputs, *second.outputs], first.constants, first.calls)


def _rename(graph: ir.Graph, other: ir.Graph) -> None:
    """Rename nodes and values of ``other`` whose names ``graph`` has, too."""
    for things in ((_values(graph), _values(other)), (list(graph), list(other))):
        taken = {one.name for one in things[0]}
        number = 0
        for one in things[1]:
            while one.name in taken:
                number += 1
                one.name = f"after.{number}"
            taken.add(one.name)


def _values(graph: ir.Graph) -> list[ir.Value]:
    return [*graph.inputs, *graph.initializers.values(), *_results(graph)]


def _results(graph: ir.Graph) -> Iterator[ir.Value]:
    return (value for node in graph.all_nodes() for value in node.outputs)


def _move(graph: ir.Graph, target: ir.Graph, outputs: Sequence[ir.Value]) -> None:
    """Append a graph's nodes and outputs to another graph, whose own outputs become ``outputs``."""
    for name, value in list(graph.initializers.items()):
        del graph.initializers[name]
        target.register_initializer(value)
    nodes, more = list(graph), list(graph.outputs)
    graph.outputs.clear()
    graph.remove(nodes)
    target.extend(nodes)
    target.outputs.clear()
    target.outputs.extend([*outputs, *more])
