"""``python -m torch2ort info``: inputs, outputs and calls of a saved model; its Functions are not needed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx.shape_inference

from torch2ort._commands.load_model import read_model
from torch2ort.errors import ModelLoadError
from torch2ort.graph.costs import Cost, Costs
from torch2ort.graph.exact_nodes import exact_nodes
from torch2ort.graph.file import METADATA_KEY
from torch2ort.graph.function_calls import called, function_calls, inline_bodies
from torch2ort.graph.graph_traversal import python_op_nodes
from torch2ort.graph.node_provenance import Origin, kernel_name
from torch2ort.pythonop import SITE_ATTRIBUTE, TENSOR, Site, load_node


def add_parser(commands: Any) -> None:
    """Add the subcommand to ``commands``, the result of ``ArgumentParser.add_subparsers``."""
    parser = commands.add_parser("info", help="inputs, outputs and PythonOps of a saved model")
    parser.add_argument("model", metavar="model.onnx", help="the file")
    parser.add_argument(
        "--size",
        action="append",
        default=[],
        metavar="NAME=N",
        help="a size that varies, for the costs (default: 1); may be repeated",
    )
    parser.set_defaults(run=_info)


def _info(arguments: argparse.Namespace) -> int:
    path = Path(arguments.model)
    try:
        sizes = dict(map(_size, arguments.size))
        model = read_model(path)
    except (ModelLoadError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    try:
        lines = [*_describe(model), *_costs(_whole(model).graph, sizes)]
    except ModelLoadError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        print(f"{path}: not a readable ONNX model ({error})", file=sys.stderr)
        return 1
    print(f"{path}: {lines[0]}", *lines[1:], sep="\n")
    return 0


def _describe(model: onnx.ModelProto) -> Iterator[str]:
    graph = model.graph
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), None)
    yield f"{_origin(model)}, opset {opset}, IR version {model.ir_version}, {_count(len(graph.node), 'node')}"
    weights = {t.name for t in graph.initializer}
    for title, values in (
        ("inputs", [v for v in graph.input if v.name not in weights]),
        ("outputs", list(graph.output)),
    ):
        yield f"{title}:"
        yield from (f"  {value.name}: {_type(value.type)}" for value in values)
    types = {t.name: f"{_element(t.data_type)} {list(t.dims)}" for t in graph.initializer}
    types.update({v.name: _type(v.type) for v in (*graph.input, *graph.output, *graph.value_info)})
    nodes = list(python_op_nodes(graph))
    functions = [node for node in nodes if node.domain == "com.microsoft"]
    yield f"PythonOps: {len(functions)}"
    for node in functions:
        yield from _describe_node(node, types)
    calls = function_calls(model)
    if calls:
        yield f"portable Functions: {len(calls)}"
    for node in calls:
        yield from _describe_call(node, types)
    kernels = [node for node in nodes if node.domain != "com.microsoft"]
    if kernels:
        yield f"kernels of PyTorch: {len(kernels)}"
    for node in kernels:
        line = Origin.of(node).line
        yield f"  {node.name}: {kernel_name(load_node(node))}" + (f" ({line})" if line else "")
    marked = exact_nodes(model)
    if marked:
        yield f"marks: {_count(len(marked), 'node')} that a session of torch2ort runs as eager PyTorch does"


def _whole(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the operators of bodies inlined, and their shapes."""
    return onnx.shape_inference.infer_shapes(inline_bodies(model)) if model.functions else model


def _size(text: str) -> tuple[str, int]:
    """Return ``("batch", 8)`` for ``batch=8``.

    Raises:
        ValueError: the text has another form.
    """
    name, _, number = text.partition("=")
    if not name.isidentifier() or not number.isdecimal():
        raise ValueError(f"--size {text}: expected NAME=N, as in --size batch=8")
    return name, int(number)


def _costs(graph: onnx.GraphProto, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield a table: nodes, operations and bytes by kind of operator, the most operations first."""
    costs = Costs(graph, sizes)
    kinds: dict[str, list[Cost]] = {}
    for cost in costs:
        kinds.setdefault(cost.kind, []).append(cost)
    chosen = {**dict.fromkeys(sorted(costs.free), 1), **sizes}
    where = f" ({', '.join(f'{name} = {size}' for name, size in chosen.items())})" if chosen else ""
    yield f"costs{where}:"
    yield f"  {'operator':<36} {'nodes':>6} {'FLOPs':>10} {'bytes':>10}"
    rows = [(kind, len(found), *_sums(found)) for kind, found in kinds.items()]
    rows.sort(key=lambda row: (-(row[2] or 0), -(row[3] or 0), row[0]))
    everything = [cost for found in kinds.values() for cost in found]
    for kind, count, flops, size in [*rows, ("total", len(everything), *_sums(everything))]:
        yield f"  {kind:<36} {count:>6} {_number(flops):>10} {_number(size):>10}"


def _sums(costs: Sequence[Cost]) -> tuple[int | None, int | None]:
    """Return the sums of the known operations and bytes; ``None`` if none are known."""
    flops = [c.flops for c in costs if c.flops is not None]
    sizes = [c.bytes for c in costs if c.bytes is not None]
    return sum(flops) if flops or not costs else None, sum(sizes) if sizes or not costs else None


def _number(value: int | None) -> str:
    """Return a number as a text such as ``1.23 M``; ``?`` if it is unknown."""
    if value is None:
        return "?"
    for unit, least in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= least:
            return f"{value / least:.2f} {unit}"
    return str(value)


def _origin(model: onnx.ModelProto) -> str:
    texts = {p.key: p.value for p in model.metadata_props}
    if METADATA_KEY not in texts:
        return f"an ONNX model of {model.producer_name or 'an unnamed producer'}, not saved by torch2ort"
    try:
        data = json.loads(texts[METADATA_KEY])
        mode = "training" if data["training"] else "inference"
        return f"saved by torch2ort in format {data['version']}, {mode} mode"
    except (ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"its torch2ort metadata is damaged ({error})") from error


def _describe_node(node: onnx.NodeProto, types: Mapping[str, str]) -> Iterator[str]:
    texts = {a.name: a.s.decode() for a in node.attribute if a.type == onnx.AttributeProto.STRING}
    yield f"  {node.name}: {texts.get('func_name', '(no func_name)')}"
    line = Origin.of(node).line
    if line:
        yield f"    line {line}"
    inputs = iter(node.input)
    if SITE_ATTRIBUTE in texts:
        yield from (f"    {line}" for line in _arguments(load_node(node), inputs, types))
    else:
        yield from (f"    input {name}: {types.get(name, 'unknown')}" for name in inputs)
    for name in node.output[1:]:
        yield f"    output {name or '(unused)'}: {types.get(name, 'unknown')}"


def _describe_call(node: onnx.NodeProto, types: Mapping[str, str]) -> Iterator[str]:
    site = called(node)
    yield f"  {node.name}: {site.func_name}, as {node.domain}::{node.op_type}"
    line = Origin.of(node).line
    if line:
        yield f"    line {line}"
    yield from (f"    {line}" for line in _arguments(site, iter(node.input), types))
    for name in node.output:
        yield f"    output {name or '(unused)'}: {types.get(name, 'unknown')}"


def _arguments(site: Site, inputs: Iterator[str], types: Mapping[str, str]) -> Iterator[str]:
    tensors = iter(site.known_result.inputs)
    for position, value in enumerate(site.arguments):
        if value is not TENSOR:
            yield f"argument {position}: {value!r}"
            continue
        kind, name = next(tensors), next(inputs, "")
        fallback = f"{str(kind.dtype).removeprefix('torch.')}, rank {kind.rank}"
        yield f"argument {position}: {name}: {types.get(name, fallback)}"


def _type(kind: onnx.TypeProto) -> str:
    """Return a type as a text such as ``float32 [batch, 6]``."""
    if not kind.HasField("tensor_type"):
        return str(kind.WhichOneof("value"))
    tensor = kind.tensor_type
    if not tensor.HasField("shape"):
        return f"{_element(tensor.elem_type)} of unknown rank"
    sizes = (d.dim_param or (str(d.dim_value) if d.HasField("dim_value") else "?") for d in tensor.shape.dim)
    return f"{_element(tensor.elem_type)} [{', '.join(sizes)}]"


def _element(number: int) -> str:
    name = onnx.helper.tensor_dtype_to_string(number).removeprefix("TensorProto.").lower()
    return {"float": "float32", "double": "float64"}.get(name, name)  # PyTorch's names


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
