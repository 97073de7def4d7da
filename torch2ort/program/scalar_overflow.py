"""Numbers that an integer dtype cannot represent, converted as in the installed torch: ``x + 300`` for bytes.

Eager PyTorch wraps such a number in a computation, and raises an error where it fills a tensor with it. A
trace shows neither.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch

from torch2ort.errors import DtypeError
from torch2ort.support.provenance import source_line

_COMPUTED = frozenset(
    {
        "add", "sub", "rsub", "mul", "div", "floor_divide", "remainder", "fmod", "pow", "eq", "ne", "lt",
        "le", "gt", "ge", "bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__",
    }
)  # fmt: skip
_FILLED = frozenset({"full", "full_like", "new_full", "fill", "masked_fill", "index_fill", "where"})
_NUMBERS = ("fill_value", "value", "self", "other")


def wrap_scalars(graph: torch.fx.Graph) -> None:
    """Replace numbers by those that operators compute with in eager PyTorch.

    Args:
        graph: graph of a program; changed in place.

    Raises:
        DtypeError: eager PyTorch would refuse a number at run time.
    """
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.name.startswith("aten::"):
            continue
        name = schema.name.removeprefix("aten::")
        name = name if name.endswith("__") else name.removesuffix("_")
        if name in _COMPUTED:
            _wrap(node)
        elif name in _FILLED:
            _refuse_fillings(node, schema)


def _wrap(node: torch.fx.Node) -> None:
    """Wrap a number that is outside of the range of its tensors' dtype."""
    dtypes = {argument.meta["val"].dtype for argument in node.args if _is_tensor(argument)}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    # A quotient has another dtype, which represents the number.
    kinds = (dtype, node.meta["val"].dtype)
    if dtype == torch.bool or any(kind.is_floating_point or kind.is_complex for kind in kinds):
        return
    ends = torch.iinfo(dtype)
    numbers = torch.tensor([ends.min, ends.min + 1, 1, 2, ends.max - 1, ends.max], dtype=dtype)
    for position, number in enumerate(node.args[:2]):
        if type(number) is not int or ends.min <= number <= ends.max:
            continue
        wrapped = (number - ends.min) % (ends.max - ends.min + 1) + ends.min
        given, settled = list(node.args), list(node.args)
        settled[position] = wrapped
        try:
            expected, found = (_called(node, arguments, numbers) for arguments in (given, settled))
        except RuntimeError as error:
            raise _refusal(node, number, dtype, error) from None
        if torch.equal(expected, found):
            node.args = tuple(settled)


def _called(node: torch.fx.Node, arguments: list[Any], numbers: torch.Tensor) -> torch.Tensor:
    given = [numbers.clone() if _is_tensor(argument) else argument for argument in arguments]
    assert callable(node.target)
    result: torch.Tensor = node.target(*given, **node.kwargs)
    return result


def _refuse_fillings(node: torch.fx.Node, schema: torch.FunctionSchema) -> None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex():
        return
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False))
    for name in _NUMBERS:
        number = given.get(name)
        if not isinstance(number, (int, float)):
            continue
        try:
            torch.full((1,), number, dtype=value.dtype)
        except RuntimeError as error:
            raise _refusal(node, number, value.dtype, error) from None


def _refusal(node: torch.fx.Node, number: Any, dtype: torch.dtype, why: object) -> DtypeError:
    return DtypeError(
        f"{node.target} at {source_line(node)}: eager PyTorch refuses the number {number} for {dtype} "
        f"({why}). Take one that the dtype holds"
    )


def _is_tensor(argument: object) -> TypeGuard[torch.fx.Node]:
    return isinstance(argument, torch.fx.Node) and isinstance(argument.meta.get("val"), torch.Tensor)
