"""Varying sizes: ``dynamic_shapes``, as torch.export and torch.onnx accept it, assigned to flat tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from torch2ort.capture.sample_call import DimSpec
from torch2ort.errors import ExportError

_DIMENSIONS = "a dict such as {0: 'batch'}, or one entry for each of its {count} dimensions"


class SizeName(torch.export.Dim):
    """A size with a name and no bounds, as in ``dynamic_shapes`` of ``torch.onnx.export``."""


def flat_dim_specs(bound: Mapping[str, Any], dynamic_shapes: Any, count: int) -> list[DimSpec]:
    """Assign ``dynamic_shapes``, as ``torch.export.export`` accepts it, to the flat tensors.

    A text in place of a ``torch.export.Dim`` becomes a :class:`SizeName`, as in ``torch.onnx.export``.

    Args:
        bound: the call's arguments by name.
        dynamic_shapes: ``None``; or a mapping from argument names, or a sequence in their order, of
            specs nested like the arguments, with a dict or sequence of dimensions at each tensor.
        count: number of tensors in ``bound``.

    Raises:
        ExportError: ``dynamic_shapes`` is not nested like the arguments, or does not fit a tensor.
    """
    if dynamic_shapes is None:
        return [None] * count
    if not isinstance(dynamic_shapes, Mapping):
        dynamic_shapes = dict(zip(bound, _in_order(bound, dynamic_shapes), strict=False))
    unknown = [name for name in dynamic_shapes if name not in bound]
    if unknown:
        raise ExportError(
            f"dynamic_shapes names {unknown[0]!r}, which is not an argument of the call; expected some of "
            f"{list(bound)}"
        )
    specs: list[DimSpec] = []
    for name, value in bound.items():
        _lay_specs(value, dynamic_shapes.get(name), name, specs)
    return specs


def without_names(specs: Sequence[DimSpec]) -> tuple[list[DimSpec], list[dict[int, str]]]:
    """Replace each :class:`SizeName` of ``specs`` by ``Dim.AUTO``, whose bounds torch.export determines.

    Returns:
        The specs, and per tensor, dimension -> name.
    """
    found: list[DimSpec] = []
    names: list[dict[int, str]] = []
    for spec in specs:
        entries = dict(spec.items() if isinstance(spec, Mapping) else enumerate(spec or ()))
        names.append({axis: dim.__name__ for axis, dim in entries.items() if isinstance(dim, SizeName)})
        loose = {axis: torch.export.Dim.AUTO for axis in names[-1]}
        found.append({**entries, **loose} if loose else spec)
    return found, names


def are_bound(error: BaseException) -> bool:
    """Return True if ``error`` of torch.export means that sizes cannot vary as ``dynamic_shapes`` states."""
    # The second text occurs where torch.export fails to suggest a bound that is no whole number.
    return "Constraints violated" in str(error) or "Expected op to be '=='" in str(error)


def advice(error: Exception) -> str:
    """Return advice on ``dynamic_shapes`` if torch.export's ``error`` is about bound sizes, else ``""``."""
    if not are_bound(error):
        return ""
    return (
        "\nIn dynamic_shapes use one name for sizes that are equal, and give a size its bounds, as in "
        "torch.export.Dim('batch', min=2, max=512). Or pass torch.export.Dim.AUTO, which infers both; calls "
        "with other sizes are then refused"
    )


def _in_order(bound: Mapping[str, Any], dynamic_shapes: Any) -> Sequence[Any]:
    if not isinstance(dynamic_shapes, Sequence) or isinstance(dynamic_shapes, str):
        raise ExportError(
            f"dynamic_shapes is {dynamic_shapes!r}; expected a dict by the names of the arguments, such as "
            f"{{{next(iter(bound), 'x')!r}: {{0: 'batch'}}}}, or a sequence in their order"
        )
    if any(spec is not None for spec in dynamic_shapes[len(bound) :]):
        raise ExportError(
            f"dynamic_shapes has {len(dynamic_shapes)} entries for a call with {len(bound)} arguments "
            f"({', '.join(bound)}); give one for each"
        )
    return dynamic_shapes


def _lay_specs(value: Any, spec: Any, path: str, specs: list[DimSpec]) -> None:
    if isinstance(value, torch.Tensor):
        specs.append(_of_tensor(value, spec, path))
        return
    children = _children(value)
    for position, (key, child) in enumerate(children):
        if spec is None:
            part = None
        elif isinstance(spec, Mapping) and set(spec) <= {k for k, _ in children}:
            part = spec.get(key)
        elif isinstance(spec, Sequence) and not isinstance(spec, str) and len(spec) == len(children):
            part = spec[position]
        else:
            raise ExportError(
                f"dynamic_shapes for '{path}': expected None, a mapping or a sequence of {len(children)} "
                f"entries like the "
                f"argument itself ({type(value).__name__}), got {spec!r}"
            )
        _lay_specs(child, part, f"{path}[{key!r}]", specs)


def _of_tensor(tensor: torch.Tensor, spec: Any, path: str) -> DimSpec:
    """Return the dimensions of one tensor, with names replaced by Dims."""
    count = tensor.dim()
    if spec is None:
        return None
    if isinstance(spec, Mapping):
        if all(isinstance(axis, int) and -count <= axis < count for axis in spec):
            return {axis % count: _dim(entry, path) for axis, entry in spec.items()}
    elif isinstance(spec, Sequence) and not isinstance(spec, str) and len(spec) == count:
        return [_dim(entry, path) for entry in spec]
    raise ExportError(
        f"dynamic_shapes for '{path}', a tensor of shape {list(tensor.shape)}: expected None, "
        f"{_DIMENSIONS.replace('{count}', str(count))}, got {spec!r}"
    )


def _dim(entry: Any, path: str) -> Any:
    if not isinstance(entry, str):
        return entry
    if not entry.isidentifier():
        raise ExportError(
            f"dynamic_shapes for '{path}': {entry!r} names a size and has to be a name as Python has them "
            f"(letters, digits and _); write {_identifier(entry)!r}"
        )
    return SizeName(entry)


def _identifier(text: str) -> str:
    name = "".join(c if c.isalnum() else "_" for c in text) or "size"
    return name if name.isidentifier() else f"size_{name}"


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in fields(value)]
    return []
