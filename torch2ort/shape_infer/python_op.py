"""The shape rule of PythonOp, which calls the inferer that is registered for the node's ``func_name``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnx_shape_inference import ShapeInferenceContext

from torch2ort.errors import ModelLoadError, ShapeInferenceError
from torch2ort.pythonop import (
    ONNX_TYPES,
    SITE_ATTRIBUTE,
    SITE_META,
    PythonOpSite,
    Site,
    UnstoredObject,
    load_site,
)
from torch2ort.pythonop.abstract_run.inferer_validation import Dim, InferredTensor, infer_outputs
from torch2ort.pythonop.registry import inferer_of
from torch2ort.sizes import expressions as sizes

_RANKS = "output_tensor_ranks"
_TYPES = "output_tensor_types"
_DTYPES = {number: dtype for dtype, number in ONNX_TYPES.items()}


def infer_python_op(context: ShapeInferenceContext, node: ir.Node) -> None:
    """Set the site's dtypes and ranks, the sizes that capture found, and those that an inferer returns.

    Raises:
        ShapeInferenceError: the inferer contradicts the site.
    """
    if _RANKS not in node.attributes:
        return
    # The context gets no shape: onnxruntime-training infers a scalar, although its kernel returns int64[1].
    own, *tensors = node.outputs
    context.set_dtype(own, ir.DataType.INT64)
    ranks, types = node.attributes[_RANKS].as_ints(), node.attributes[_TYPES].as_ints()
    for value, dtype in zip(tensors, types, strict=True):
        context.set_dtype(value, ir.DataType(dtype))
    for value, rank, shape in zip(tensors, ranks, _inferred_shapes(node, ranks, types), strict=True):
        if shape is not None:
            dims = [context.new_symbolic_dim() if d is None else _write(d) for d in shape]
        elif value.shape is None:
            dims = [context.new_symbolic_dim() for _ in range(rank)]
        else:
            continue
        context.set_shape(value, ir.Shape(dims))


def _inferred_shapes(
    node: ir.Node, ranks: Sequence[int], types: Sequence[int]
) -> list[tuple[Dim, ...] | None]:
    """Return the shape of each tensor output by the registered inferer; ``None`` where it returns none."""
    unknown: list[tuple[Dim, ...] | None] = [None] * len(ranks)
    site = _site_of(node)
    if site is None or site.internal:
        return unknown
    inferer = inferer_of(site.func_name, site.function)
    if inferer is None or any(isinstance(v, UnstoredObject) for v in site.constants.values()):
        return unknown
    shapes: list[list[Any] | None] = []
    for i, value in enumerate(node.inputs):
        if value is None or value.dtype is None:
            return unknown
        shapes.append(_read(value, i))
    dtypes = [
        _DTYPES[int(value.dtype)] for value in node.inputs if value is not None and value.dtype is not None
    ]
    call = PythonOpSite(site.func_name, site.function, node.name or "", site.constants)
    inferred = infer_outputs(inferer, call, shapes, dtypes)
    _check(site.func_name, inferred, ranks, types)
    return [tensor.shape for tensor in inferred] + unknown[len(inferred) :]


def _site_of(node: ir.Node) -> Site | None:
    if SITE_META in node.meta:
        site: Site = node.meta[SITE_META]
        return site
    if SITE_ATTRIBUTE not in node.attributes or "func_name" not in node.attributes:
        return None
    try:
        return load_site(
            node.attributes["func_name"].as_string(), node.attributes[SITE_ATTRIBUTE].as_string()
        )
    except ModelLoadError:
        return None


def _read(value: ir.Value, position: int) -> list[Any] | None:
    """Return the shape of an input in the form that an inferer takes; a size without a name gets one."""
    if value.shape is None:
        return None
    return [
        d if isinstance(d, int) else sizes.parse(d.value or f"input_{position}_dim_{axis}")
        for axis, d in enumerate(value.shape)
    ]


def _write(dim: Dim) -> int | ir.SymbolicDim:
    return dim if isinstance(dim, int) else ir.SymbolicDim(sizes.text(dim))


def _check(name: str, inferred: Sequence[InferredTensor], ranks: Sequence[int], types: Sequence[int]) -> None:
    dtypes: list[torch.dtype] = [_DTYPES[t] for t in types]
    if len(inferred) > len(ranks):
        raise ShapeInferenceError(
            f"{name}: the shape inferer returned {len(inferred)} shapes, but the node has {len(ranks)} "
            f"tensor outputs"
        )
    for i, tensor in enumerate(inferred):
        if tensor.dtype != dtypes[i]:
            raise ShapeInferenceError(
                f"{name}: the shape inferer says that output {i} has dtype {tensor.dtype}, but the node "
                f"says {dtypes[i]}"
            )
        if tensor.shape is not None and len(tensor.shape) != ranks[i]:
            raise ShapeInferenceError(
                f"{name}: the shape inferer says that output {i} has {len(tensor.shape)} dimensions, but "
                f"the node says {ranks[i]}"
            )
