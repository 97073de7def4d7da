"""Ranges of the integers in a program, as far as the program determines them."""

from __future__ import annotations

import operator
from typing import Any, TypeAlias

import torch

from torch2ort._torch import fake_tensors as private
from torch2ort.program.kernel_sites import arguments_of

# The smallest and the largest number, both inclusive; numbers or sizes that vary.
Interval: TypeAlias = "tuple[Any, Any]"

# They return only numbers of their first argument.
_REARRANGED = frozenset(
    {
        "_to_copy", "_unsafe_view", "alias", "chunk", "clone", "contiguous", "detach", "detach_", "diagonal",
        "expand", "expand_as", "flatten", "flip", "lift_fresh", "lift_fresh_copy", "movedim", "narrow",
        "permute", "ravel", "repeat", "repeat_interleave", "reshape", "reshape_as", "roll", "select", "slice",
        "split", "squeeze", "t", "tile", "to", "transpose", "unbind", "unflatten", "unfold", "unsqueeze",
        "view", "view_as",
    }
)  # fmt: skip
_POSITIONS = frozenset(
    {"argmax", "argmin", "argsort", "cummax", "cummin", "kthvalue", "max", "median", "min", "sort", "topk"}
)
_JOINED = frozenset({"cat", "concat", "hstack", "stack", "vstack"})


def is_within(program: torch.export.ExportedProgram | None, node: torch.fx.Node, low: Any, size: Any) -> bool:
    """Return True if all numbers of ``node`` are known to be at least ``low`` and below ``size``.

    The values of constants are unknown without a ``program``.
    """
    found = _intervals(program, node)
    return found is not None and all(
        private.is_known(smallest >= low) and private.is_known(largest < size) for smallest, largest in found
    )


def _intervals(program: torch.export.ExportedProgram | None, node: Any) -> list[Interval] | None:
    """Return intervals that contain all numbers of ``node``; ``None`` where nothing is known."""
    if isinstance(node, (int, torch.SymInt)):
        return [(node, node)]
    if not isinstance(node, torch.fx.Node):
        return None
    value = node.meta.get("val")
    if isinstance(value, (int, torch.SymInt)):
        return [(value, value)]
    if node.op == "placeholder":
        return _of_constant(program, node)
    if node.target is operator.getitem:
        return _of_part(program, node)
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.name.startswith("aten::") or _is_float(value):
        return None
    name, arguments = schema.name.removeprefix("aten::"), arguments_of(node)
    if name in _REARRANGED:
        source = next(iter(arguments.values()))
        return None if _is_float(source.meta["val"]) else _intervals(program, source)
    if name in _POSITIONS and not isinstance(value, (list, tuple)):
        return _positions(arguments)
    if name in _JOINED:
        return _union(program, *arguments["tensors"])
    if name == "where" and "other" in arguments:
        return _union(program, arguments["self"], arguments["other"])
    if name in ("add", "sub", "rsub", "mul"):
        return _arithmetic(program, name, arguments)
    return _made(name, arguments)


def _of_constant(program: torch.export.ExportedProgram | None, node: torch.fx.Node) -> list[Interval] | None:
    """Return the range of a constant in the model's code; a tensor of the model may change."""
    if program is None:
        return None
    name = program.graph_signature.inputs_to_lifted_tensor_constants.get(node.name, "")
    tensor = program.constants.get(name)
    if not name.rpartition(".")[2].startswith("lifted_tensor") or not isinstance(tensor, torch.Tensor):
        return None
    if tensor.is_floating_point() or tensor.is_complex() or not tensor.numel():
        return None
    return [(int(tensor.min()), int(tensor.max()))]


def _of_part(program: torch.export.ExportedProgram | None, node: torch.fx.Node) -> list[Interval] | None:
    whole, position = node.args
    name = getattr(getattr(whole, "target", None), "_schema", None)
    if name is None or not isinstance(whole, torch.fx.Node) or _is_float(node.meta.get("val")):
        return None
    short = name.name.removeprefix("aten::")
    if short in _POSITIONS:
        return _positions(arguments_of(whole)) if position == 1 else None
    if short in _REARRANGED:
        return _intervals(program, next(iter(arguments_of(whole).values())))
    return None


def _positions(arguments: dict[str, Any]) -> list[Interval]:
    value, dim = arguments["self"].meta["val"], arguments.get("dim")
    if value.dim() == 0:
        return [(0, 0)]
    return [(0, (value.numel() if dim is None else value.shape[dim]) - 1)]


def _union(program: torch.export.ExportedProgram | None, *parts: Any) -> list[Interval] | None:
    found: list[Interval] = []
    for part in parts:
        one = _intervals(program, part)
        if one is None:
            return None
        found += one
    return found


def _arithmetic(
    program: torch.export.ExportedProgram | None, name: str, arguments: dict[str, Any]
) -> list[Interval] | None:
    first, second = _intervals(program, arguments["self"]), _intervals(program, arguments["other"])
    if first is None or second is None or arguments.get("alpha", 1) != 1:
        return None
    if name == "add":
        return [(a + c, b + d) for a, b in first for c, d in second]
    if name == "sub":
        return [(a - d, b - c) for a, b in first for c, d in second]
    if name == "rsub":
        return [(c - b, d - a) for a, b in first for c, d in second]
    if all(isinstance(n, int) and n >= 0 for interval in (*first, *second) for n in interval):
        return [(a * c, b * d) for a, b in first for c, d in second]
    return None


def _made(name: str, arguments: dict[str, Any]) -> list[Interval] | None:
    """Return the range of numbers that do not depend on another tensor."""
    numbers = {k: _number(v) for k, v in arguments.items()}
    if name == "arange" and numbers.get("end") is not None:
        start, step = numbers.get("start", 0), numbers.get("step", 1)
        return [(start, numbers["end"] - 1)] if step == 1 and start is not None else None
    if name in ("zeros", "zeros_like", "new_zeros"):
        return [(0, 0)]
    if name in ("ones", "ones_like", "new_ones"):
        return [(1, 1)]
    if name in ("full", "full_like", "new_full", "scalar_tensor"):
        filled = numbers.get("fill_value", numbers.get("s"))
        return None if filled is None else [(filled, filled)]
    if name == "clamp" and numbers.get("min") is not None and numbers.get("max") is not None:
        return [(min(numbers["min"], numbers["max"]), numbers["max"])] if _are_ints(numbers) else None
    if name == "remainder" and isinstance(numbers.get("other"), int) and numbers["other"] > 0:
        return [(0, numbers["other"] - 1)]
    return None


def _are_ints(numbers: dict[str, Any]) -> bool:
    return isinstance(numbers["min"], int) and isinstance(numbers["max"], int)


def _number(value: Any) -> Any:
    if isinstance(value, torch.fx.Node):
        value = value.meta.get("val")
    return value if isinstance(value, (int, torch.SymInt)) else None


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
