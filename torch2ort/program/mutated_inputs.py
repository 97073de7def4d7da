"""Writes into buffers and inputs, as extra outputs of a graph."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NoReturn

import onnx_ir as ir
import torch
from torch.export.graph_signature import OutputKind

from torch2ort._torch.dispatch import OpOverload, has_effects
from torch2ort._torch.storage import memory_of
from torch2ort.capture.sample_call import PREFIX
from torch2ort.errors import ExportError, UnsupportedOperatorError
from torch2ort.graph.mutation import Mutation
from torch2ort.program.alias_analysis import written_by
from torch2ort.program.kernel_sites import arguments_of

# Operators whose schemas omit the update of running statistics -> the argument that switches it on.
_NORMALIZATIONS: dict[Any, str] = {
    torch.ops.aten.batch_norm.default: "training",
    torch.ops.aten.native_batch_norm.default: "training",
    torch.ops.aten.instance_norm.default: "use_input_stats",
}
_KINDS: dict[OutputKind, Literal["buffer", "input"]] = {
    OutputKind.BUFFER_MUTATION: "buffer",
    OutputKind.USER_INPUT_MUTATION: "input",
}


def mutations_of(program: torch.export.ExportedProgram, model: str) -> tuple[Mutation, ...]:
    """Return the writes of a program that is not functional yet, buffers first, in the order of its inputs.

    Args:
        program: a program without regions; each mutation names an input of it.
        model: name of the model's class.

    Raises:
        ExportError: the program writes to a constant.
        UnsupportedOperatorError: the program writes to a parameter.
    """
    signature = program.graph_signature
    constants = signature.inputs_to_lifted_tensor_constants
    # In a trace the strides of its argument decide if a reshape returns a view or a copy.
    targets = (target for node in program.graph.nodes for target in _written_by(node))
    written = {memory_of(target.meta["val"]) for target in targets} - {None}
    mutations: list[Mutation] = []
    for node in program.graph.find_nodes(op="placeholder"):
        if memory_of(node.meta["val"]) not in written:
            continue
        name = node.name
        if name in constants:
            refuse_written_constant(model, constants[name])
        if name in signature.inputs_to_parameters:
            _refuse_mutation(signature.inputs_to_parameters[name], OutputKind.PARAMETER_MUTATION)
        kind: Literal["buffer", "input"] = "buffer" if name in signature.inputs_to_buffers else "input"
        target = signature.inputs_to_buffers.get(name, name)
        if kind == "buffer":
            _refuse_shared(model, program, target, constants.values())
        mutations.append(Mutation(f"{target}.updated", kind, target))
    return tuple(mutations)


def _written_by(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield the arguments whose values ``node`` changes, including those that its schema omits."""
    if node.target in _NORMALIZATIONS:
        given = arguments_of(node)
        if given[_NORMALIZATIONS[node.target]]:
            yield from (n for n in (given["running_mean"], given["running_var"]) if n is not None)
    # An operator that changes only a tensor's shape or metadata, such as detach_() and t_(), keeps its
    # values.
    elif isinstance(node.target, OpOverload) and torch.Tag.inplace_view not in node.target.tags:
        yield from written_by(node)


def _refuse_shared(
    model: str, program: torch.export.ExportedProgram, buffer: str, constants: Iterable[str]
) -> None:
    """Refuse a write into a buffer that the model reads under another name, too."""
    tensors = {**program.state_dict, **program.constants}
    for name in constants:
        if memory_of(tensors[name]) == memory_of(tensors[buffer]):
            raise ExportError(
                f"{model}: forward writes to the buffer '{buffer.removeprefix(PREFIX)}', whose memory the "
                f"model reads through another tensor, too. Read the buffer itself, or write to a clone of it"
            )


def refuse_written_constant(model: str, name: str) -> NoReturn:
    """Refuse a write into a tensor of the model that is no buffer.

    Raises:
        ExportError: always.
    """
    name = name.removeprefix(PREFIX)
    if name.startswith("lifted_tensor"):
        raise ExportError(
            f"{model}: forward writes to a tensor that is no attribute of a module of the model, so "
            f"a graph would not. Make it a buffer with register_buffer; put a module that is in "
            f"a list or a dict into torch.nn.ModuleList or ModuleDict"
        )
    raise ExportError(
        f"{model}: forward writes to the tensor '{name}', which is no buffer, so a "
        f"graph would not. Make it one with register_buffer"
    )


def refuse_effects(graph: torch.fx.Graph) -> None:
    """Refuse operators that have an effect besides their results.

    Raises:
        UnsupportedOperatorError: the graph contains such an operator.
    """
    if any(has_effects(node.target) for node in graph.nodes if node.op == "call_function"):
        _refuse_effect()


def _refuse_effect() -> NoReturn:
    raise UnsupportedOperatorError(
        "forward calls an operator that has an effect besides its results, as torch's print, and a "
        "graph has no order in which such effects come. Put the call into a torch.autograd.Function"
    )


def refuse_other_mutations(program: torch.export.ExportedProgram) -> None:
    """Raise :class:`UnsupportedOperatorError` if ``forward`` writes into what a graph cannot update."""
    for spec in program.graph_signature.output_specs:
        if spec.kind == OutputKind.TOKEN:
            _refuse_effect()
        if spec.kind != OutputKind.USER_OUTPUT and spec.kind not in _KINDS:
            _refuse_mutation(spec.target, spec.kind)


def _refuse_mutation(target: str | None, kind: OutputKind) -> NoReturn:
    raise UnsupportedOperatorError(
        f"forward writes into {target!r}, which is no buffer and no input "
        f"({kind.name.lower()}); a graph can update buffers and inputs only. Update it outside "
        f"of forward, or make it a buffer"
    )


def add_mutation_outputs(model: ir.Model, program: torch.export.ExportedProgram) -> tuple[Mutation, ...]:
    """Add an output for each mutation of ``program``.

    Args:
        model: the graph that torch.onnx made; its values have the names of the nodes of ``program``.
        program: the functional program that the graph was made from.
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
    """Return the name of the value of FX node ``name``: if several nodes select one result, the last one."""
    nodes = list(program.graph.nodes)
    node = next(n for n in nodes if n.name == name)
    if node.target is not operator.getitem:
        return name
    return str([n.name for n in nodes if n.target is operator.getitem and n.args == node.args][-1])
