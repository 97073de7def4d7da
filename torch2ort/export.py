"""From a PyTorch model to an ONNX graph that keeps every custom Function.

model + sample ─ io_schema ─► tensors ─ trace ─► ExportedProgram + sites
─ symbolics ─► ONNX with PythonOp nodes ─ shape_infer ─► ExportedModel
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir
import torch

from torch2ort import io_schema, shape_infer, symbolics
from torch2ort._naming import name_interface, separate_outputs
from torch2ort._sizes import Sizes
from torch2ort._trace import PREFIX, DimSpec, Trace, flat_dim_specs, trace
from torch2ort.exported_model import CacheReport, ExportedModel, Interface, frozen
from torch2ort.log import apply_level, logger
from torch2ort.options import DEFAULT_OPSET, Options, with_arguments
from torch2ort.pythonop import ONNX_TYPES, SITE_ATTRIBUTE, Site, node_attributes, site_by_key
from torch2ort.runtime import Graph
from torch2ort.symbolics import Mutation
from torch2ort.symbolics.graph_builder import ops

# Where a node remembers its site between translation and the end of the export.
_SITE_KEY = "torch2ort.site"


@dataclass(frozen=True)
class Call:
    """One call of a model, as an export takes it.

    Attributes:
        signature: names and defaults of the model's arguments.
        tensors: its tensors, flat.
        schema: the structure around them.
        dim_specs: per tensor, which dimensions vary.
    """

    signature: io_schema.Signature
    tensors: Sequence[torch.Tensor]
    schema: io_schema.Schema
    dim_specs: Sequence[DimSpec]


@dataclass(frozen=True)
class Built:
    """An exported graph whose weights are still the model's own.

    Attributes:
        graph: weights are graph inputs.
        weights: graph input -> the model's tensor.
        interface: how a call maps to the graph's inputs and outputs.
        training: the mode that was exported.
    """

    graph: Graph
    weights: dict[str, torch.Tensor]
    interface: Interface
    training: bool


def export(
    model: torch.nn.Module,
    sample: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    training: bool | None = None,
    opset: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    options: Options | None = None,
) -> ExportedModel:
    """Export ``model`` to ONNX; every call of a custom Function becomes a ``PythonOp`` node.

    The model, its parameters, buffers, hooks and mode, the random state and ``Function.apply`` are
    afterwards as before, also when this raises.

    Args:
        model: any module that torch.export can trace (non-strict).
        sample: a tuple holds the positional arguments, a dict the keyword arguments, anything else is
            the one positional argument. Arguments may be nested.
        kwargs: keyword arguments beside a tuple ``sample``.
        dynamic_shapes: as for ``torch.export.export``; ``None`` takes every size from the sample.
        training: export that mode; ``None`` takes ``model.training``.
        opset: ONNX opset, 18 to 21; 18 by default.
        cache_dir: folder of the export cache.
        options: further settings.

    Returns:
        The exported model, with the weights as they are now.

    Raises:
        ExportError: the model cannot be exported; says where and why.
        UnsupportedOperatorError: an operator has no translation.
        SchemaError: an argument or output is of a kind that cannot be flattened.
        OptionError: an option is not allowed.
    """
    options = with_arguments(options, opset=opset, cache_dir=cache_dir)
    apply_level(options)
    args, keywords = _arguments(sample, kwargs)
    signature = io_schema.Signature.of(model.forward)
    bound = signature.bind(args, keywords)
    tensors, schema = io_schema.flatten(bound)
    call = Call(signature, tensors, schema, flat_dim_specs(bound, dynamic_shapes, len(tensors)))
    mode = model.training if training is None else training
    built = build(model, call, training=training, differentiate=mode, options=options)
    return ExportedModel(
        frozen(built.graph, built.weights),
        {},
        built.interface,
        training=built.training,
        options=options,
        cache=CacheReport(),
    )


def build(
    model: torch.nn.Module,
    call: Call,
    *,
    training: bool | None,
    differentiate: bool,
    options: Options,
    with_hooks: bool = True,
) -> Built:
    """Trace, translate and infer shapes: the pipeline behind ``export`` and ``ORTModule``.

    Args:
        model: the model.
        call: the sample call.
        training: the mode; ``None`` takes ``model.training``.
        differentiate: whether every operator must have a correct gradient in the engine.
        options: opset and debugging.
        with_hooks: whether hooks of the model itself are part of the graph.

    Raises:
        ExportError: see :func:`export`.
    """
    mode = model.training if training is None else training
    traced = trace(
        model,
        call.signature,
        call.tensors,
        call.schema,
        call.dim_specs,
        training=training,
        with_hooks=with_hooks,
    )
    with warnings.catch_warnings():
        # torch 2.13 copies its own deprecated tree specs.
        warnings.simplefilter("ignore", FutureWarning)
        program = symbolics.prepare(traced.program, training=differentiate)
        translated = symbolics.translate(
            program, training=differentiate, opset=options.opset or DEFAULT_OPSET, python_op=_translate_python_op
        )
    sites = _name_sites(translated.model.graph)
    weights = _lift_weights(translated.model, model, traced.program)
    names = [leaf.name or "input" for leaf in call.schema.leaves]
    separate_outputs(translated.model.graph)
    name_interface(
        translated.model.graph, names, [leaf.name or "output" for leaf in traced.output_schema.leaves], PREFIX
    )
    shape_infer.infer(translated.model)
    proto = ir.to_proto(translated.model)
    onnx.checker.check_model(proto)
    count = len(traced.output_schema.leaves)
    placeholders = list(traced.program.graph_signature.user_inputs)
    outputs = tuple(value.name for value in proto.graph.output)
    graph = Graph(
        proto=proto,
        inputs=tuple(names),
        weights={value.name or "": origin for value, origin, _ in weights},
        outputs=outputs[:count],
        mutations=tuple(
            Mutation(
                o,
                m.kind,
                m.target.removeprefix(PREFIX) if m.kind == "buffer" else names[placeholders.index(m.target)],
            )
            for o, m in zip(outputs[count:], translated.mutations, strict=True)
        ),
        sites=sites,
    )
    logger.info(
        "exported %s: %d nodes, %d PythonOps", type(model).__name__, len(proto.graph.node), len(graph.sites)
    )
    interface = Interface(call.signature, call.schema, traced.output_schema, _sizes(traced, names))
    return Built(graph, {value.name or "": tensor for value, _, tensor in weights}, interface, mode)


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


def _arguments(sample: Any, kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if type(sample) is tuple:
        return sample, dict(kwargs or {})
    if type(sample) is dict:
        return (), {**sample, **(kwargs or {})}
    return (sample,), dict(kwargs or {})


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


def _sizes(traced: Trace, names: Sequence[str]) -> Sizes:
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
