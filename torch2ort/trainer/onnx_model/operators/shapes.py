"""Operators of ONNX for shapes, indexing and element types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import torch
import torch.nn.functional as F

from torch2ort.trainer.onnx_model.operators.dtypes import DTYPES
from torch2ort.trainer.onnx_model.operators.host_scalars import (
    Value,
    axes_of,
    is_host,
    number,
    numbers,
    positive,
    product,
    refuse_unless,
    tensor,
    tensors,
)


def shape(x: Value, *, start: int = 0, end: int | None = None) -> Value:
    """Shape."""
    sizes = list(x.shape) if isinstance(x, torch.Tensor) else [len(x)] if isinstance(x, list) else []
    return sizes[start:end]


def size(x: Value) -> Value:
    """Size."""
    return product(shape(x))


def reshape(x: Value, sizes: Value, *, allowzero: int = 0) -> Value:
    """Reshape."""
    wanted = numbers(sizes, "the shape of Reshape")
    if is_host(x):
        refuse_unless(len(wanted) <= 1, "Reshape of sizes to a table")
        flat = numbers(x, "Reshape")
        return flat if wanted else flat[0]
    if not allowzero:
        wanted = [x.shape[i] if isinstance(one, int) and one == 0 else one for i, one in enumerate(wanted)]
    return torch.reshape(x, wanted)


def flatten(x: Value, *, axis: int = 1) -> Value:
    """Flatten to a matrix."""
    axis = positive(axis, x.dim())
    return torch.reshape(x, (product(x.shape[:axis]), product(x.shape[axis:])))


def squeeze(x: Value, axes: Value = None) -> Value:
    """Squeeze."""
    if is_host(x):
        return numbers(x, "Squeeze")[0]
    if axes is None:
        return torch.squeeze(x)
    return torch.squeeze(x, tuple(axes_of(axes, x.dim())))


def unsqueeze(x: Value, axes: Value) -> Value:
    """Unsqueeze."""
    places = numbers(axes, "the axes of Unsqueeze")
    if is_host(x) and not isinstance(x, list) and len(places) == 1:
        return [x]
    result = tensor(x)
    for axis in sorted(positive(int(axis), result.dim() + len(places)) for axis in places):
        result = torch.unsqueeze(result, axis)
    return result


def transpose(x: Value, *, perm: list[int] | None = None) -> Value:
    """Transpose."""
    return torch.permute(x, tuple(perm) if perm is not None else tuple(reversed(range(x.dim()))))


def concat(*values: Value, axis: int) -> Value:
    """Concat."""
    if is_host(*values):
        return [one for value in values for one in numbers(value, "Concat")]
    return torch.cat(tensors(*values), axis)


def split(
    x: Value, sizes: Value = None, *, axis: int = 0, num_outputs: int | None = None, declared: int
) -> Value:
    """Split; `declared` is the number of the node's outputs."""
    if sizes is not None:
        return tuple(torch.split(x, [int(one) for one in numbers(sizes, "the sizes of Split")], axis))
    parts = num_outputs or declared
    step = -(-x.shape[axis] // parts)
    return tuple(torch.split(x, step, axis))


def sliced(x: Value, starts: Value, ends: Value, axes: Value = None, steps: Value = None) -> Value:
    """Slice."""
    first, last = numbers(starts, "the starts of Slice"), numbers(ends, "the ends of Slice")
    rank = 1 if is_host(x) else x.dim()
    places = list(range(len(first))) if axes is None else axes_of(axes, rank)
    strides = [1] * len(first) if steps is None else [int(s) for s in numbers(steps, "the steps of Slice")]
    if is_host(x):
        result = list(x)
        for start, end, step in zip(first, last, strides, strict=True):
            result = result[start:end:step]
        return result
    for axis, start, end, step in zip(places, first, last, strides, strict=True):
        if step < 0:
            x = _backwards(x, axis, start, end, step)
        else:
            x = x[(slice(None),) * axis + (slice(start, end, step),)]
    return x


def _backwards(x: torch.Tensor, axis: int, start: Any, end: Any, step: int) -> torch.Tensor:
    """Slice with a negative step, over a flipped axis."""
    whole = start in (-1,) or (isinstance(start, int) and start >= 2**31)
    refuse_unless(
        whole and isinstance(end, int) and end <= -(2**31), "Slice backwards over a part of an axis"
    )
    turned = torch.flip(x, [axis])
    return turned[(slice(None),) * axis + (slice(None, None, -step),)]


def gather(x: Value, indices: Value, *, axis: int = 0) -> Value:
    """Gather."""
    if is_host(x, indices):
        values = numbers(x, "Gather")
        return [values[i] for i in indices] if isinstance(indices, list) else values[indices]
    if is_host(indices) and not isinstance(indices, list):
        return torch.select(x, axis, indices)
    data, places = tensors(x, indices)
    axis = positive(axis, data.dim())
    if axis == 0 and data.dim() == 2:
        return F.embedding(_counted(places, data.shape[0]), data)
    flat = torch.index_select(data, axis, _counted(places, data.shape[axis]).reshape(-1))
    return flat.reshape((*data.shape[:axis], *places.shape, *data.shape[axis + 1 :]))


def _counted(places: torch.Tensor, length: Any) -> torch.Tensor:
    """Return indices counted from the front, as int64."""
    places = places.to(torch.int64)
    return torch.where(places < 0, places + length, places)


def gather_elements(x: Value, indices: Value, *, axis: int = 0) -> Value:
    """GatherElements."""
    data, places = tensors(x, indices)
    return torch.gather(data, axis, _counted(places, data.shape[axis]))


def gather_nd(x: Value, indices: Value, *, batch_dims: int = 0) -> Value:
    """GatherND."""
    refuse_unless(batch_dims == 0, "GatherND with batch_dims")
    data, places = tensors(x, indices)
    parts = torch.unbind(places.to(torch.int64), -1)
    return data[tuple(_counted(part, data.shape[i]) for i, part in enumerate(parts))]


def scatter_elements(
    x: Value, indices: Value, updates: Value, *, axis: int = 0, reduction: str = "none"
) -> Value:
    """ScatterElements."""
    data, places, values = tensors(x, indices, updates)
    places = _counted(places, data.shape[axis])
    if reduction == "none":
        return torch.scatter(data, axis, places, values)
    refuse_unless(reduction == "add", f"ScatterElements with the reduction {reduction}")
    return torch.scatter_add(data, axis, places, values)


def scatter_nd(x: Value, indices: Value, updates: Value, *, reduction: str = "none") -> Value:
    """ScatterND."""
    refuse_unless(reduction in ("none", "add"), f"ScatterND with the reduction {reduction}")
    data, places, values = tensors(x, indices, updates)
    parts = torch.unbind(places.to(torch.int64), -1)
    where = tuple(_counted(part, data.shape[i]) for i, part in enumerate(parts))
    return torch.index_put(data, where, values, accumulate=reduction == "add")


def expand(x: Value, sizes: Value) -> Value:
    """Expand, in both directions."""
    wanted = numbers(sizes, "the shape of Expand")
    x = tensor(x)
    missing = len(wanted) - x.dim()
    own = [1] * missing + list(x.shape)
    wanted = [1] * -missing + wanted
    target = [a if isinstance(b, int) and b == 1 else b for a, b in zip(own, wanted, strict=True)]
    return torch.broadcast_to(x, target)


def tile(x: Value, repeats: Value) -> Value:
    """Tile."""
    return x.repeat([int(one) for one in numbers(repeats, "the repeats of Tile")])


def pad(x: Value, pads: Value, value: Value = None, axes: Value = None, *, mode: str = "constant") -> Value:
    """Pad."""
    amounts = numbers(pads, "the pads of Pad")
    places = axes_of(axes, x.dim())
    count = len(places)
    sides = {axis: (amounts[i], amounts[i + count]) for i, axis in enumerate(places)}
    flat = [one for axis in reversed(range(x.dim())) for one in sides.get(axis, (0, 0))]
    if mode == "constant":
        fill = (
            0.0
            if value is None
            else value.item()
            if isinstance(value, torch.Tensor)
            else number(value, "Pad")
        )
        return F.pad(x, flat, value=fill)
    refuse_unless(mode in ("reflect", "edge"), f"Pad with the mode {mode}")
    while len(flat) > 2 and not any(flat[-2:]):
        flat = flat[:-2]
    return F.pad(x, flat, mode="replicate" if mode == "edge" else mode)


def constant_of_shape(sizes: Value, *, value: tuple[Any, int] = (0.0, onnx.TensorProto.FLOAT)) -> Value:
    """ConstantOfShape, of a number and its element type."""
    wanted = numbers(sizes, "the shape of ConstantOfShape")
    number, dtype = value[0], DTYPES[value[1]]
    if len(wanted) == 1 and isinstance(wanted[0], int) and dtype is torch.int64:
        return [number] * wanted[0]
    return torch.full(wanted, number, dtype=dtype)


def number_range(start: Value, limit: Value, step: Value) -> Value:
    """Range."""
    given = [number(value, "Range") for value in (start, limit, step)]
    if all(isinstance(one, int) for one in given):
        return list(range(*given))
    return torch.arange(*given)


def one_hot(indices: Value, depth: Value, values: Value, *, axis: int = -1) -> Value:
    """OneHot."""
    places, pair = tensors(indices, values)
    length = int(number(depth, "the depth of OneHot"))
    places = _counted(places, length)
    axis = positive(axis, places.dim() + 1)
    steps = torch.arange(length, device=places.device).reshape([-1] + [1] * (places.dim() - axis))
    return torch.where(torch.unsqueeze(places, axis) == steps, pair[1], pair[0])


def trilu(x: Value, k: Value = 0, *, upper: int = 1) -> Value:
    """Trilu."""
    diagonal = int(number(k, "the diagonal of Trilu"))
    return torch.triu(x, diagonal) if upper else torch.tril(x, diagonal)


def eye_like(x: Value, *, dtype: int | None = None, k: int = 0) -> Value:
    """EyeLike."""
    ones = torch.ones_like(x, dtype=x.dtype if dtype is None else DTYPES[dtype])
    return torch.triu(torch.tril(ones, k), k)


def depth_to_space(x: Value, *, blocksize: int, mode: str = "DCR") -> Value:
    """DepthToSpace."""
    n, c, h, w = x.shape
    if mode == "CRD":
        return F.pixel_shuffle(x, blocksize)
    parts = x.reshape(n, blocksize, blocksize, c // blocksize**2, h, w)
    return parts.permute(0, 3, 4, 1, 5, 2).reshape(n, c // blocksize**2, h * blocksize, w * blocksize)


def space_to_depth(x: Value, *, blocksize: int) -> Value:
    """SpaceToDepth."""
    n, c, h, w = x.shape
    parts = x.reshape(n, c, h // blocksize, blocksize, w // blocksize, blocksize)
    return parts.permute(0, 3, 5, 1, 2, 4).reshape(n, c * blocksize**2, h // blocksize, w // blocksize)


SHAPES: dict[str, Callable[..., Value]] = {
    "Shape": shape, "Size": size, "Reshape": reshape, "Flatten": flatten, "Squeeze": squeeze,
    "Unsqueeze": unsqueeze, "Transpose": transpose, "Concat": concat, "Split": split, "Slice": sliced,
    "Gather": gather, "GatherElements": gather_elements, "GatherND": gather_nd,
    "ScatterElements": scatter_elements, "ScatterND": scatter_nd, "Expand": expand, "Tile": tile, "Pad": pad,
    "ConstantOfShape": constant_of_shape, "Range": number_range, "OneHot": one_hot, "Trilu": trilu,
    "EyeLike": eye_like, "DepthToSpace": depth_to_space, "SpaceToDepth": space_to_depth,
}  # fmt: skip
