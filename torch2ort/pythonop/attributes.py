"""Conversion between a site and the attributes of a ``com.microsoft::PythonOp`` node.

The attributes of onnxruntime-training's schema are written for other readers (they store floats in 32
bits, and no ``str``, ``None`` or nested value). torch2ort's own attribute ``site`` contains the exact call as
JSON and is the one that is read back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import torch

from torch2ort.errors import ExportError, ModelLoadError
from torch2ort.pythonop import autocast
from torch2ort.pythonop.caught_exceptions import ExceptClause
from torch2ort.pythonop.site import TENSOR, Result, Site, Size, TensorType
from torch2ort.pythonop.site_validation import check_node, check_site

SITE_ATTRIBUTE = "site"
# Metadata entry with the key of a node's site, while the node is being translated and is in no file.
SITE_META = "torch2ort.site"
FORMAT_VERSION = 1

ONNX_TYPES: dict[torch.dtype, int] = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float64: onnx.TensorProto.DOUBLE,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.int8: onnx.TensorProto.INT8,
    torch.int16: onnx.TensorProto.INT16,
    torch.int32: onnx.TensorProto.INT32,
    torch.int64: onnx.TensorProto.INT64,
    torch.uint8: onnx.TensorProto.UINT8,
    torch.bool: onnx.TensorProto.BOOL,
    torch.complex64: onnx.TensorProto.COMPLEX64,
    torch.complex128: onnx.TensorProto.COMPLEX128,
}


class UnstorableError(Exception):
    """A Python value that a file cannot store."""


def onnx_type(dtype: torch.dtype, site: Site) -> int:
    """Return the ONNX element type of ``dtype``; raise :class:`ExportError` if there is none."""
    if dtype not in ONNX_TYPES:
        raise ExportError(
            f"{site.func_name}: a tensor of dtype {dtype} cannot be in an ONNX graph; expected one of "
            f"{', '.join(str(d) for d in ONNX_TYPES)}. Convert the tensor before the call"
        )
    return ONNX_TYPES[dtype]


def node_attributes(site: Site) -> dict[str, Any]:
    """Return the attributes of the site's node, as Python values (int, str, list of int or float)."""
    result = site.known_result
    attributes: dict[str, Any] = {
        "func_name": site.func_name,
        **call_attributes(site.constants, len(site.arguments)),
        "input_requires_grads": [int(n) for n in site.needs_input_grad],
        "input_tensor_types": [onnx_type(t.dtype, site) for t in result.inputs],
        "input_tensor_ranks": [t.rank for t in result.inputs],
        "output_tensor_types": [onnx_type(t.dtype, site) for t in result.tensors],
        "output_tensor_ranks": [t.rank for t in result.tensors],
        "training_mode": int(site.training),
        "safe_run_mode": 1,
        "comment": site.func_name,
        **_reuse_maps(site, result),
        SITE_ATTRIBUTE: dump_site(site),
    }
    return attributes


def _reuse_maps(site: Site, result: Result) -> dict[str, list[int]]:
    """Return the in-place maps as onnxruntime's allocation planner reads them: by node input and output.

    The first output of the node, and the first input of its gradient node, is the context.
    """
    outputs = [i for i, value in enumerate(result.outputs) if value is TENSOR]
    arguments = site.tensor_positions
    maps: dict[str, list[int]] = {}
    if result.forward_map:
        maps["tensor_reuse_map"] = [-1] * (1 + len(result.tensors))
        for output, argument in result.forward_map:
            maps["tensor_reuse_map"][1 + outputs.index(output)] = arguments.index(argument)
    if result.backward_map:
        maps["bw_tensor_reuse_map"] = [-1] * len(arguments)
        for argument, output in result.backward_map:
            maps["bw_tensor_reuse_map"][arguments.index(argument)] = 1 + outputs.index(output)
    return maps


def call_attributes(constants: Mapping[int, Any], count: int) -> dict[str, Any]:
    """Return the attributes that describe a call's arguments.

    Args:
        constants: argument position -> value, for the arguments that are not tensors.
        count: number of arguments.
    """
    attributes: dict[str, Any] = {
        "input_convention": "".join("c" if i in constants else "d" for i in range(count))
    }
    for position, value in constants.items():
        _add_constant(attributes, position, value)
    return attributes


def _add_constant(attributes: dict[str, Any], position: int, value: Any) -> None:
    def append(name: str, *values: Any) -> None:
        attributes.setdefault(name, []).extend(values)

    kinds: dict[type, tuple[str, Callable[[Any], Any]]] = {
        bool: ("bool", int), int: ("int", int), float: ("float", lambda v: float(np.float32(v)))
    }  # fmt: skip
    if type(value) in kinds and (type(value) is not int or -(2**63) <= value < 2**63):
        name, convert = kinds[type(value)]
        append(f"input_{name}_scalars", convert(value))
        append(f"input_{name}_scalar_positions", position)
    elif type(value) is tuple and value and type(value[0]) in kinds and len({type(v) for v in value}) == 1:
        name, convert = kinds[type(value[0])]
        append(f"input_{name}_tuple_begins", len(attributes.get(f"input_{name}_tuples", [])))
        append(f"input_{name}_tuples", *map(convert, value))
        append(f"input_{name}_tuple_positions", position)


def dump_site(site: Site) -> str:
    """Return the site as JSON; a constant that a file cannot store becomes a marker, see `unstorable`."""
    result = site.known_result
    return json.dumps(
        {
            "version": FORMAT_VERSION,
            "arguments": [_dump_or_mark(a) for a in site.arguments],
            "needs_input_grad": list(site.needs_input_grad),
            "training": site.training,
            "internal": site.internal,
            "originals": list(site.originals),
            "written_back": list(site.written_back),
            "fresh": list(site.fresh),
            "remembers": site.remembers,
            "caught": [list(handler) for handler in site.caught],
            "autocast": {} if site.autocast is None else site.autocast.dump(),
            "inputs": [_dump_type(t) for t in result.inputs],
            "outputs": [_dump_or_mark(v) for v in result.outputs],
            "tensors": [_dump_type(t) for t in result.tensors],
            "returns_tuple": result.returns_tuple,
            "non_differentiable": list(result.non_differentiable),
            "mutated": list(result.mutated),
            "returned_inputs": [list(pair) for pair in result.returned_inputs],
            "hidden": list(result.hidden),
            "kept": list(result.kept),
            "uses_rng": result.uses_rng,
            "effects": result.effects,
            "observed": result.observed,
            "forward_map": [list(pair) for pair in result.forward_map],
            "backward_map": [list(pair) for pair in result.backward_map],
            "kept_results": None if result.kept_results is None else list(result.kept_results),
            "sizes": [list(sizes) for sizes in result.sizes],
            "repeated": [list(pair) for pair in result.repeated],
        }
    )


def load_site(func_name: str, text: str) -> Site:
    """Return the site that :func:`dump_site` wrote, not yet resolved to a class.

    Raises:
        ModelLoadError: ``text`` is not such a site; the message says why.
    """
    try:
        data = json.loads(text)
        if data["version"] != FORMAT_VERSION:
            raise ModelLoadError(
                f"PythonOp {func_name}: its site is of format {data['version']!r}, this torch2ort reads "
                f"{FORMAT_VERSION}"
            )
        result = Result(
            inputs=tuple(map(_load_type, data["inputs"])),
            outputs=tuple(map(load_constant, data["outputs"])),
            tensors=tuple(map(_load_type, data["tensors"])),
            returns_tuple=_typed(data["returns_tuple"], bool),
            non_differentiable=_integers(data["non_differentiable"]),
            mutated=_integers(data["mutated"]),
            returned_inputs=_pairs(data["returned_inputs"]),
            hidden=_integers(data["hidden"]),
            kept=_integers(data["kept"]),
            uses_rng=_typed(data["uses_rng"], bool),
            effects=_typed(data.get("effects", False), bool),
            observed=_typed(data["observed"], bool),
            forward_map=_pairs(data["forward_map"]),
            backward_map=_pairs(data["backward_map"]),
            kept_results=None if data.get("kept_results") is None else _integers(data["kept_results"]),
            sizes=tuple(tuple(map(_load_size, sizes)) for sizes in data.get("sizes", ())),
            repeated=_pairs(data.get("repeated", ())),
        )
        site = Site(
            func_name=func_name,
            function=None,
            arguments=tuple(map(load_constant, data["arguments"])),
            needs_input_grad=tuple(_typed(n, bool) for n in data["needs_input_grad"]),
            training=_typed(data["training"], bool),
            internal=_typed(data["internal"], bool),
            originals=_integers(data.get("originals", ())),
            written_back=_integers(data.get("written_back", ())),
            fresh=_integers(data.get("fresh", ())),
            remembers=_typed(data.get("remembers", False), bool),
            caught=tuple(ExceptClause(*(_typed(t, str) for t in pair)) for pair in data.get("caught", ())),
            autocast=autocast.load(_typed(data.get("autocast", {}), dict)),
            result=result,
        )
        check_site(site, ONNX_TYPES)
    except ModelLoadError:
        raise
    except Exception as error:  # invalid numbers, dtypes and devices raise errors of many kinds
        raise ModelLoadError(
            f"PythonOp {func_name}: its attribute '{SITE_ATTRIBUTE}' is damaged ({error})"
        ) from error
    return site


def load_node(node: onnx.NodeProto) -> Site:
    """Return the site of a PythonOp node, not yet resolved to a class, after a check of the node against it.

    Raises:
        ModelLoadError: the node has no site, a damaged one, or other attributes than an export writes.
    """
    texts = {a.name: a.s for a in node.attribute if a.type == onnx.AttributeProto.STRING}
    try:
        name, text = texts["func_name"].decode(), texts[SITE_ATTRIBUTE].decode()
    except (KeyError, UnicodeDecodeError) as error:
        raise ModelLoadError(
            f"PythonOp node '{node.name}': its attribute 'func_name' or '{SITE_ATTRIBUTE}' is missing or "
            f"damaged ({error}); export the model again"
        ) from error
    site = load_site(name, text)
    expected = node_attributes(site)
    # The site was read just now, and the comment has no meaning.
    del expected[SITE_ATTRIBUTE]
    expected["comment"] = texts.get("comment", b"").decode(errors="replace")
    check_node(node, site, expected)
    return site


def unstorable(site: Site) -> tuple[int, Any] | None:
    """Return position and value of the first argument that a file cannot store, or ``None``."""
    for position, value in site.constants.items():
        try:
            dump_constant(value)
        except UnstorableError:
            return position, value
    return None


def _dump_or_mark(value: Any) -> Any:
    try:
        return dump_constant(value)
    except UnstorableError:
        return {"object": type(value).__qualname__}


class UnstoredObject:
    """Placeholder in a loaded site for an argument that the file could not store."""

    def __init__(self, type_name: str) -> None:
        self.type_name = type_name

    def __repr__(self) -> str:
        return f"<an object of type {self.type_name}, not stored in the file>"


def dump_constant(value: Any) -> Any:
    """Return the JSON form of a Python value, exact in value and type.

    Raises:
        UnstorableError: the value, or one inside it, is of a type that has no such form.
    """
    kind = type(value)
    if value is TENSOR:
        return "tensor"
    if value is None:
        return None
    if kind is bool or kind is int:
        return value
    if kind is float:
        return {"float": value.hex()}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind is str:
        return {"str": value}
    if kind is bytes:
        return {"bytes": value.hex()}
    if value is Ellipsis:
        return {"ellipsis": True}
    if kind in (tuple, list, torch.Size, set, frozenset):
        name = "size" if kind is torch.Size else kind.__name__
        return {name: [dump_constant(v) for v in value]}
    if kind is slice:
        return {"slice": [dump_constant(v) for v in (value.start, value.stop, value.step)]}
    if kind is dict:
        return {"dict": [[dump_constant(k), dump_constant(v)] for k, v in value.items()]}
    if kind in (torch.dtype, torch.memory_format, torch.layout):
        return {"torch": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"device": str(value)}
    raise UnstorableError(f"a value of type {kind.__qualname__}")


_TORCH_NAMES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout))
}

_LOADERS: dict[str, Callable[[Any], Any]] = {
    "float": float.fromhex,
    "complex": lambda pair: complex(float.fromhex(pair[0]), float.fromhex(pair[1])),
    "str": lambda text: _typed(text, str),
    "bytes": bytes.fromhex,
    "ellipsis": lambda _: Ellipsis,
    "tuple": lambda items: tuple(map(load_constant, items)),
    "list": lambda items: list(map(load_constant, items)),
    "set": lambda items: set(map(load_constant, items)),
    "frozenset": lambda items: frozenset(map(load_constant, items)),
    "size": lambda items: torch.Size(map(load_constant, items)),
    "slice": lambda items: slice(*map(load_constant, items)),
    "dict": lambda items: {load_constant(k): load_constant(v) for k, v in items},
    "torch": lambda name: _TORCH_NAMES[name],
    "device": torch.device,
    "object": UnstoredObject,
}


def load_constant(data: Any) -> Any:
    """Return the value that :func:`dump_constant` wrote; raise ``ValueError`` or ``KeyError`` for others."""
    if data is None or isinstance(data, (bool, int)):
        return data
    if data == "tensor":
        return TENSOR
    if not isinstance(data, dict) or len(data) != 1:
        raise ValueError(f"not a constant: {data!r}")
    ((kind, payload),) = data.items()
    return _LOADERS[kind](payload)


def _dump_type(tensor: TensorType) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), tensor.rank]


def _load_type(data: Any) -> TensorType:
    name, rank = data
    dtype = _TORCH_NAMES[name]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"not a dtype: {name!r}")
    return TensorType(dtype, _typed(rank, int))


def _integers(data: Any) -> tuple[int, ...]:
    return tuple(_typed(i, int) for i in data)


def _load_size(data: Any) -> Size:
    if data is None:
        return None
    return _pairs([data])[0] if isinstance(data, list) else _typed(data, int)


def _pairs(data: Any) -> tuple[tuple[int, int], ...]:
    return tuple((_typed(a, int), _typed(b, int)) for a, b in data)


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}, got {value!r}")
    return value
