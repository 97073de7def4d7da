"""From a trace to the graph that engines run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import onnx
import onnx_ir as ir
import torch

from torch2ort import io_schema, shape_infer, symbolics
from torch2ort._naming import name_interface, separate_outputs
from torch2ort._sizes import Sizes
from torch2ort._trace import PREFIX, Trace
from torch2ort.pythonop import ONNX_TYPES, SITE_ATTRIBUTE, Site, node_attributes, site_by_key
from torch2ort.runtime import Graph
from torch2ort.symbolics import Mutation
from torch2ort.symbolics.graph_builder import ops

# Where a node remembers its site between translation and the end of the export.
_SITE_KEY = "torch2ort.site"


def lower(
    model: torch.nn.Module, traced: Trace, inputs: io_schema.Schema, *, differentiate: bool, opset: int
) -> tuple[Graph, dict[str, torch.Tensor]]:
    """Translate ``traced`` to ONNX, name what the user named, and infer the shapes.

    Args:
        model: the traced module.
        traced: one trace of it.
        inputs: schema of the call that was traced.
        differentiate: whether every operator must have a correct gradient in the engine.
        opset: ONNX opset.

    Returns:
        The graph, and its weights: graph input -> the model's tensor.

    Raises:
        UnsupportedOperatorError: an operator has no translation, or no correct gradient.
        ExportError: the graph's shapes contradict each other.
    """
    translated = _translate(traced, differentiate=differentiate, opset=opset)
    graph = translated.model.graph
    sites = _name_sites(graph)
    weights = _lift_weights(translated.model, model, traced.program)
    names = [leaf.name or "input" for leaf in inputs.leaves]
    separate_outputs(graph)
    name_interface(graph, names, [leaf.name or "output" for leaf in traced.output_schema.leaves], PREFIX)
    shape_infer.infer(translated.model)
    proto = ir.to_proto(translated.model)
    onnx.checker.check_model(proto)
    outputs = tuple(value.name for value in proto.graph.output)
    count = len(traced.output_schema.leaves)
    result = Graph(
        proto=proto,
        inputs=tuple(names),
        weights={value.name or "": origin for value, origin, _ in weights},
        outputs=outputs[:count],
        mutations=_named_mutations(translated.mutations, outputs[count:], traced, names),
        sites=sites,
    )
    return result, {value.name or "": tensor for value, _, tensor in weights}


def _translate(traced: Trace, *, differentiate: bool, opset: int) -> symbolics.Translated:
    with warnings.catch_warnings():
        # torch 2.13 copies its own deprecated tree specs.
        warnings.simplefilter("ignore", FutureWarning)
        program = symbolics.prepare(traced.program, training=differentiate)
        return symbolics.translate(
            program, training=differentiate, opset=opset, python_op=_translate_python_op
        )


def _named_mutations(
    mutations: Sequence[Mutation], outputs: Sequence[str], traced: Trace, names: Sequence[str]
) -> tuple[Mutation, ...]:
    """``mutations`` with the final names of their outputs and targets."""
    placeholders = list(traced.program.graph_signature.user_inputs)
    named = []
    for mutation, output in zip(mutations, outputs, strict=True):
        if mutation.kind == "buffer":
            target = mutation.target.removeprefix(PREFIX)
        else:
            target = names[placeholders.index(mutation.target)]
        named.append(Mutation(output, mutation.kind, target))
    return tuple(named)


def _translate_python_op(inputs: Sequence[ir.Value], key: str) -> Sequence[ir.Value]:
    """The opaque operator as a node that carries its site."""
    site = site_by_key(key)
    types = [ir.DataType.INT64, *(ir.DataType(ONNX_TYPES[t.dtype]) for t in site.known_result.tensors)]
    operator = "org.pytorch.aten::ATen" if site.internal else "com.microsoft::PythonOp"
    outputs = ops(operator, *inputs, dtypes=types, **node_attributes(site))
    node = outputs[0].producer()
    assert node is not None
    node.metadata_props[_SITE_KEY] = key
    return outputs[1:]


def _name_sites(graph: ir.Graph) -> dict[str, Site]:
    """Name the graph's PythonOp nodes by their order, which is the same in every process."""
    sites: dict[str, Site] = {}
    for node in graph:
        if SITE_ATTRIBUTE in node.attributes:
            node.name = f"PythonOp_{len(sites)}"
            site = site_by_key(node.metadata_props.pop(_SITE_KEY))
            sites[node.name] = site
    return sites


def _lift_weights(
    model: ir.Model, module: torch.nn.Module, program: torch.export.ExportedProgram
) -> list[tuple[ir.Value, str, torch.Tensor]]:
    """Turn parameters, buffers and tensor attributes from initializers into graph inputs.

    Returns:
        The graph input, its name in the model, and the model's tensor.
    """
    live: dict[str, torch.Tensor] = {
        **dict(module.named_buffers(remove_duplicate=False)),
        **dict(module.named_parameters(remove_duplicate=False)),
    }
    constants = {
        name.removeprefix(PREFIX): value
        for name, value in program.constants.items()
        if name.startswith(PREFIX) and isinstance(value, torch.Tensor)
    }
    lifted: list[tuple[ir.Value, str, torch.Tensor]] = []
    for name, value in list(model.graph.initializers.items()):
        origin = name.removeprefix(PREFIX)
        tensor = live.get(origin, constants.get(origin))
        if tensor is None:
            continue
        del model.graph.initializers[name]
        value.const_value = None
        model.graph.inputs.append(value)
        lifted.append((value, origin, tensor))
    return lifted


def sizes_of(traced: Trace, names: Sequence[str]) -> Sizes:
    """The sizes for which ``traced`` holds; ``names`` are those of its inputs."""
    program = traced.program
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    dims = [
        [d if isinstance(d, int) else str(d.node.expr) for d in values[name].shape]
        for name in program.graph_signature.user_inputs
        if isinstance(name, str)
    ]
    ranges: dict[str, tuple[int, int | None]] = {}
    for symbol, bounds in program.range_constraints.items():
        upper = bounds.upper
        ranges[str(symbol)] = (int(bounds.lower), int(upper) if upper.is_Integer else None)
    return Sizes(names, dims, ranges, traced.guards)
