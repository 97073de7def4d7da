"""Writes into buffers and inputs, as extra outputs of a graph."""

from __future__ import annotations

import operator
from typing import Literal

import onnx_ir as ir
import torch
from torch.export.graph_signature import OutputKind

from torch2ort.errors import UnsupportedOperatorError
from torch2ort.graph.mutation import Mutation

_KINDS: dict[OutputKind, Literal["buffer", "input"]] = {
    OutputKind.BUFFER_MUTATION: "buffer",
    OutputKind.USER_INPUT_MUTATION: "input",
}


def refuse_other_mutations(program: torch.export.ExportedProgram) -> None:
    """Raise :class:`UnsupportedOperatorError` if ``forward`` writes into what a graph cannot update."""
    for spec in program.graph_signature.output_specs:
        if spec.kind == OutputKind.TOKEN:
            raise UnsupportedOperatorError(
                "forward calls an operator that has an effect besides its results, as torch's print, and a "
                "graph has no order in which such effects come. Put the call into a torch.autograd.Function"
            )
        if spec.kind != OutputKind.USER_OUTPUT and spec.kind not in _KINDS:
            raise UnsupportedOperatorError(
                f"forward writes into {spec.target!r}, which is no buffer and no input "
                f"({spec.kind.name.lower()}); a graph can update buffers and inputs only. Update it outside "
                f"of forward, or make it a buffer"
            )


def add_mutation_outputs(model: ir.Model, program: torch.export.ExportedProgram) -> tuple[Mutation, ...]:
    """Add an output for each mutation of ``program``.

    Args:
        model: the graph that torch.onnx made; it names values after the nodes of ``program``.
        program: the functional program that it was made of.
    """
    signature = program.graph_signature
    renamed = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    graph = model.graph
    values = {v.name: v for v in (*graph.inputs, *graph.initializers.values())}
    values.update({v.name: v for node in graph for v in node.outputs})
    mutations: list[Mutation] = []
    for spec in signature.output_specs:
        if spec.kind not in _KINDS:
            continue
        value = values[renamed.get(spec.arg.name) or _name_in_graph(program, spec.arg.name)]
        result = ir.Node("", "Identity", [value], num_outputs=1)
        result.outputs[0].type, result.outputs[0].shape = value.type, value.shape
        graph.append(result)
        result.outputs[0].name = f"{spec.target}.updated"
        graph.outputs.append(result.outputs[0])
        mutations.append(Mutation(f"{spec.target}.updated", _KINDS[spec.kind], str(spec.target)))
    return tuple(mutations)


def _name_in_graph(program: torch.export.ExportedProgram, name: str) -> str:
    """The name of the value of FX node ``name``: of several nodes that take one result, the last."""
    nodes = list(program.graph.nodes)
    node = next(n for n in nodes if n.name == name)
    if node.target is not operator.getitem:
        return name
    return str([n.name for n in nodes if n.target is operator.getitem and n.args == node.args][-1])
