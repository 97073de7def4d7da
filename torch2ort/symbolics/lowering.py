"""Lowering of a trace to the graph that engines run."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence

import onnx_ir as ir
import torch

from torch2ort import io_schema, shape_infer, symbolics
from torch2ort.capture.sample_call import PREFIX
from torch2ort.capture.trace import Trace
from torch2ort.graph.accepted_sizes import Sizes
from torch2ort.graph.graph import Graph, GraphSignature
from torch2ort.graph.mutation import Mutation
from torch2ort.graph.random_nodes import has_side_effects
from torch2ort.program.effect_order import keep_order, keep_unused_calls
from torch2ort.program.mutated_inputs import mutations_of, refuse_written_constant
from torch2ort.program.target import Target
from torch2ort.program.traced_program import placeholder_origins
from torch2ort.program.unrepresentable_tensors import refuse_complex_weight
from torch2ort.pythonop.abstract_run.forward_probe import UserError
from torch2ort.pythonop.registry import report_unmatched
from torch2ort.sizes.symbols import named, named_symbol, program_size_names
from torch2ort.sizes.unbacked_sizes import added_conditions, conditions_of_statistics, lines_of_conditions
from torch2ort.support.startup_timing import SHAPES, phase
from torch2ort.symbolics.cleanup import drop_unread_constants
from torch2ort.symbolics.python_op_nodes import SiteNodes, shown_sites
from torch2ort.symbolics.registered import translating
from torch2ort.symbolics.type_check import refuse_mistyped
from torch2ort.symbolics.value_names import interface_names, name_interface, separate_outputs


def lower(
    model: torch.nn.Module, traced: Trace, inputs: io_schema.Schema, target: Target
) -> tuple[Graph, dict[str, torch.Tensor]]:
    """Translate ``traced`` to ONNX, assign the user's names, and infer the shapes.

    Args:
        model: the traced module.
        traced: one trace of the module.
        inputs: schema of the call that was traced.
        target: the runtime of the graph.

    Returns:
        The graph, and its weights: graph input -> the model's tensor.

    Raises:
        UnsupportedOperatorError: an operator has no translation.
        ExportError: the graph's shapes contradict each other.
    """
    size_names = program_size_names(traced.program)
    nodes = SiteNodes(size_names, target)
    with translating(size_names, target):
        translated = _translate(type(model).__name__, traced, nodes, target)
    graph = translated.model.graph
    sites = nodes.name(graph)
    if sites:
        # ONNX Runtime fuses nodes into operators of this domain, and does not find them in a model with nodes
        # of other domains that does not import it.
        translated.model.opset_imports.setdefault("com.microsoft", 1)
    keep_order(graph, {name for name, site in sites.items() if has_side_effects(site)})
    weights = _lift_weights(translated.model, model, traced.program)
    separate_outputs(graph)
    keep_unused_calls(graph, sites)
    drop_unread_constants(graph)
    names, wanted, targets = _wanted_names(traced, inputs, translated.mutations)
    name_interface(graph, names, wanted, PREFIX)
    with phase(SHAPES), shown_sites(graph, sites):
        shape_infer.infer(translated.model, size_names)
    proto = ir.to_proto(translated.model)
    refuse_mistyped(proto, translated.model)
    report_unmatched(site.function for site in traced.sites.values() if site.function is not None)
    outputs = tuple(value.name for value in proto.graph.output)
    count = len(traced.ties.tracked)
    result = Graph(
        proto=proto,
        inputs=tuple(names),
        weights={value.name or "": origin for value, origin, _ in weights},
        outputs=outputs[:count],
        mutations=tuple(
            Mutation(output, mutation.kind, target)
            for output, mutation, target in zip(outputs[count:], translated.mutations, targets, strict=True)
        ),
        sites=sites,
    )
    return result, {value.name or "": tensor for value, _, tensor in weights}


def _translate(name: str, traced: Trace, nodes: SiteNodes, target: Target) -> symbolics.Translated:
    with warnings.catch_warnings():
        # torch 2.13 copies its own deprecated tree specs.
        warnings.simplefilter("ignore", FutureWarning)
        try:
            prepared = symbolics.prepare(traced.program, target)
            return symbolics.translate(prepared, target, python_op=nodes.translate)
        except UserError as carrier:
            raise carrier.error from None
        except RuntimeError as error:
            written = re.match(r"Constant (\S+) is mutated in the forward method", str(error))
            if written is None:
                raise
            refuse_written_constant(name, written[1])


def _wanted_names(
    traced: Trace, inputs: io_schema.Schema, mutations: Sequence[Mutation]
) -> tuple[list[str], list[str], list[str]]:
    """Return the inputs' names, the outputs' wanted names, and the final name of each mutation's target."""
    names = [leaf.name or "input" for leaf in inputs.leaves]
    placeholders = list(traced.program.graph_signature.user_inputs)
    targets = [
        m.target.removeprefix(PREFIX) if m.kind == "buffer" else names[placeholders.index(m.target)]
        for m in mutations
    ]
    returned = [leaf.name or "output" for leaf in traced.output_schema.leaves]
    left = [f"left_{i}" for i in range(len(traced.ties.tracked) - len(returned))]
    return names, [*returned, *left, *(f"{target}.updated" for target in targets)], targets


def signature_of(
    model: torch.nn.Module, traced: Trace, inputs: io_schema.Schema
) -> tuple[GraphSignature, dict[str, torch.Tensor]]:
    """Return the names of a graph that is not built yet.

    Args:
        model: the traced module.
        traced: one trace of the module, without regions.
        inputs: schema of the call that was traced.

    Returns:
        The names, and the weights: graph input -> the model's tensor.

    Raises:
        ExportError: forward writes to a tensor that is no buffer.
        UnsupportedOperatorError: forward writes to a parameter.
    """
    program = traced.program
    report_unmatched(site.function for site in traced.sites.values() if site.function is not None)
    mutations = mutations_of(program, type(model).__name__)
    names, wanted, targets = _wanted_names(traced, inputs, mutations)
    tensors = _tensors_of(model, program)
    read = [origin for origin in _origins(program) if origin in tensors]
    weights, outputs = interface_names(names, read, wanted, PREFIX)
    count = len(traced.ties.tracked)
    signature = GraphSignature(
        inputs=tuple(names),
        weights={name: origin.removeprefix(PREFIX) for name, origin in zip(weights, read, strict=True)},
        outputs=tuple(outputs[:count]),
        mutations=tuple(
            Mutation(output, mutation.kind, target)
            for output, mutation, target in zip(outputs[count:], mutations, targets, strict=True)
        ),
    )
    return signature, {name: tensors[origin] for name, origin in zip(weights, read, strict=True)}


def _origins(program: torch.export.ExportedProgram) -> Iterator[str]:
    """Yield the names, in a program, of the tensors of the model that it reads or writes."""
    origins = placeholder_origins(program)
    for node in program.graph.find_nodes(op="placeholder"):
        if node.users and node.name in origins:
            yield origins[node.name]


def _lift_weights(
    model: ir.Model, module: torch.nn.Module, program: torch.export.ExportedProgram
) -> list[tuple[ir.Value, str, torch.Tensor]]:
    """Turn parameters, buffers and tensor attributes from initializers into graph inputs.

    Returns:
        The graph input, its name in the model, and the model's tensor.
    """
    tensors = _tensors_of(module, program)
    lifted: list[tuple[ir.Value, str, torch.Tensor]] = []
    for name, value in list(model.graph.initializers.items()):
        if not name.startswith(PREFIX):
            # A constant of the program itself, which may have the name of a buffer.
            continue
        origin = name.removeprefix(PREFIX)
        tensor = tensors.get(name)
        if tensor is None:
            continue
        refuse_complex_weight(value, tensor)
        del model.graph.initializers[name]
        value.const_value = None
        model.graph.inputs.append(value)
        lifted.append((value, origin, tensor))
    return lifted


def _tensors_of(module: torch.nn.Module, program: torch.export.ExportedProgram) -> dict[str, torch.Tensor]:
    """Return the model's tensors by their names in a program, which start with the prefix."""
    constants = {
        name: value
        for name, value in program.constants.items()
        if name.startswith(PREFIX) and isinstance(value, torch.Tensor)
    }
    named = (*module.named_buffers(remove_duplicate=False), *module.named_parameters(remove_duplicate=False))
    return {**constants, **{PREFIX + name: tensor for name, tensor in named}}


def sizes_of(traced: Trace, names: Sequence[str]) -> Sizes:
    """Return the sizes for which ``traced``, and the programs made from it so far, hold.

    Args:
        traced: a trace.
        names: names of its inputs.

    Raises:
        UnsupportedOperatorError: the sizes cannot be determined.
    """
    program = traced.program
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    inputs = [values[name] for name in program.graph_signature.user_inputs if isinstance(name, str)]
    size_names = program_size_names(program)
    dims = [[named(d, size_names) for d in value.shape] for value in inputs]
    ranges: dict[str, tuple[int, int | None]] = {}
    for symbol, bounds in program.range_constraints.items():
        if not bounds.lower.is_Integer:
            # Not a size, but a number that forward reads out of a tensor.
            continue
        upper = bounds.upper
        ranges[named_symbol(symbol, size_names)] = (
            int(bounds.lower),
            int(upper) if upper.is_Integer else None,
        )
    added = added_conditions(program.graph, traced.conditions, inputs)
    statistics = conditions_of_statistics(program.graph, inputs)
    lines = lines_of_conditions(program.graph)
    return Sizes(names, dims, ranges, (*traced.guards, *added, *statistics), lines)
