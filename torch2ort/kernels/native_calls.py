"""Calls of PyTorch's kernels that a node can make in C++, without Python.

The extension calls operators through the C interface that torch keeps stable for compiled models (see
``runtime_ext/direct/``). Here is decided which calls it can hold, and how its arguments are written down.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch2ort._torch import dispatch as private
from torch2ort.kernels.functions import READ_GRAD_MODE, Call, decode_call


@dataclass(frozen=True)
class DirectArguments:
    """What ``DirectCall`` of the extension is made of, beside its site.

    Attributes:
        operator: with its namespace.
        overload: ``""`` for the default one.
        arguments: one an argument of the schema, or the tensors alone if there is a function.
        results: of each whether it is computed, and the order of its dimensions, empty for its own.
        function: the function of the C interface to call instead of the dispatcher; ``""`` for none.
        numbers: the numbers that this function takes.
        written: the argument that tells the sizes of a result that is written to the runtime's memory, which
            is the tensor behind the site's: ``("like", i)``, or ``("product", i)`` of that matrix and the
            next; ``None`` for results with memory of their own.
        grad_mode: whether PyTorch's grad mode is on while it runs.
    """

    operator: str
    overload: str
    arguments: list[Any]
    results: list[tuple[bool, tuple[int, ...]]]
    function: str = ""
    numbers: tuple[float, ...] = ()
    written: tuple[str, int] | None = None
    grad_mode: bool = False


class _UnwritableError(Exception):
    """The C interface cannot hold an argument."""


# Functions for operators that take Scalars, which the dispatcher's C interface has no form for.
_FUNCTIONS = {
    "aten::add.Tensor": "aoti_torch_cpu_add_Tensor",
    "aten::mul.Scalar": "aoti_torch_cpu_mul_Scalar",
    "aten::pow.Tensor_Scalar": "aoti_torch_cpu_pow_Tensor_Scalar",
}
# Those that write their result to the first tensor.
_WRITING_FUNCTIONS = {
    "aten::addmm": "aoti_torch_cpu_addmm_out",
    "aten::baddbmm": "aoti_torch_cpu_baddbmm_out",
}
# The same where a tensor is given as a Python number.
_WITH_NUMBER = {
    "aten::add.Tensor": "aoti_torch_cpu_add_Scalar",
    "aten::mul.Tensor": "aoti_torch_cpu_mul_Scalar",
}
# Operators whose kernel writes to memory that it is given -> that overload, and what tells the sizes. The
# runtime's memory is used again from node to node and step to step, while torch's comes from the heap, which
# gives large blocks back to the system and gets them with pages to be filled again.
_WRITING_OVERLOADS = {
    "aten::mm": ("out", ("product", 0)),
    "aten::bmm": ("out", ("product", 0)),
    **dict.fromkeys(
        (
            *("aten::_log_softmax", "aten::_log_softmax_backward_data"),
            *("aten::_softmax", "aten::_softmax_backward_data"),
            *("aten::gelu", "aten::sigmoid", "aten::silu", "aten::tanh"),
        ),
        ("out", ("like", 0)),
    ),
    **dict.fromkeys(
        ("aten::gelu_backward", "aten::sigmoid_backward", "aten::silu_backward", "aten::tanh_backward"),
        ("grad_input", ("like", 0)),
    ),
}


@functools.lru_cache(maxsize=4096)
def direct_arguments(text: str, dtypes: tuple[torch.dtype, ...]) -> DirectArguments | None:
    """How the call that ``text`` describes is made in C++; ``None`` if it cannot be.

    Args:
        text: as :func:`~torch2ort.kernels.functions.decode_call` takes it.
        dtypes: of its tensors.
    """
    call = decode_call(text)
    schema = private.schema_of(call.operator)
    returns = [str(r.type) for r in schema.returns]
    if call.random or call.views or call.operator.namespace != "aten" or set(returns) != {"Tensor"}:
        return None
    mask = [True] * len(returns) if call.mask is None else list(call.mask)
    orders = [tuple(order or ()) for order in call.orders] or [()] * len(returns)
    if len(mask) != len(returns) or len(orders) != len(returns):
        return None
    results = list(zip(mask, orders, strict=True))
    try:
        given = _given(call)
        if any(isinstance(v, (int, float)) and str(a.type) in ("Tensor", "number") for a, v in given):
            return _by_function(call, given, dtypes, results)
        arguments = [_written(value, str(a.real_type), a.N, call.tensors) for a, value in given]
        grad_mode = call.operator in READ_GRAD_MODE
        direct = DirectArguments(schema.name, schema.overload_name, arguments, results, grad_mode=grad_mode)
        return _writing(direct, dtypes)
    except _UnwritableError:
        return None


def _given(call: Call) -> list[tuple[Any, Any]]:
    """Each argument of the schema with what the call has for it, defaults filled in."""
    pairs = []
    for i, argument in enumerate(private.schema_of(call.operator).arguments):
        if argument.name in call.keywords:
            value = call.keywords[argument.name]
        elif i < len(call.arguments):
            value = call.arguments[i]
        elif argument.has_default_value():
            value = argument.default_value
        else:
            raise _UnwritableError
        pairs.append((argument, value))
    return pairs


def _by_function(
    call: Call,
    given: Sequence[tuple[Any, Any]],
    dtypes: Sequence[torch.dtype],
    results: list[tuple[bool, tuple[int, ...]]],
) -> DirectArguments:
    """A call that takes numbers, by a function of the C interface.

    It takes numbers as floats, which makes no difference where all tensors are floating.
    """
    schema, name = private.schema_of(call.operator), call.operator.name()
    tensors = [_written(v, "Tensor", None, call.tensors) for _, v in given if isinstance(v, dict)]
    numbers = [v for _, v in given if not isinstance(v, dict)]
    expected = sum(str(a.type) == "Tensor" for a, _ in given)
    floating = all(dtype.is_floating_point for dtype in dtypes)
    plain = all(isinstance(n, float) or (type(n) is int and abs(n) < 2**24) for n in numbers)
    written = None
    if len(tensors) == expected and name in _WRITING_FUNCTIONS:
        function = _WRITING_FUNCTIONS[name]
        tensors, written = [("tensor", len(dtypes)), *tensors], ("product", 2)
    else:
        function = (_FUNCTIONS if len(tensors) == expected else _WITH_NUMBER).get(name, "")
    if not function or not floating or not plain or any(call.orders):
        raise _UnwritableError
    floats = tuple(float(n) for n in numbers)
    return DirectArguments(schema.name, schema.overload_name, tensors, results, function, floats, written)


def _writing(direct: DirectArguments, dtypes: Sequence[torch.dtype]) -> DirectArguments:
    """The same call with its result written to the runtime's memory, where its kernel can."""
    overload, written = _WRITING_OVERLOADS.get(direct.operator, ("", None))
    ordered = any(order for _, order in direct.results)
    if direct.overload or written is None or ordered or not _is_of_one_type(direct, dtypes):
        return direct
    if written[0] == "like" and any(isinstance(a, tuple) and a[0] == "permuted" for a in direct.arguments):
        # oneDNN's kernels take no other order of memory for the result than for the arguments.
        return direct
    arguments = [*direct.arguments, ("tensor", len(dtypes))]
    return replace(direct, overload=overload, arguments=arguments, written=written)


def _is_of_one_type(direct: DirectArguments, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether the tensors of a call, and so its result, are of one floating-point type."""
    named = {str(a[1]) for a in direct.arguments if isinstance(a, tuple) and a[0] == "dtype"}
    names = {str(dtype).removeprefix("torch.") for dtype in dtypes} | named
    return len(names) == 1 and all(dtype.is_floating_point for dtype in dtypes)


def _written(value: Any, kind: str, length: int | None, tensors: int) -> Any:
    """An argument as the extension takes it.

    Args:
        value: as the text of a call has it.
        kind: the type that the schema has for it.
        length: how often a single number stands for a list of them.
        tensors: of the call, that whose sizes alone are read the last of them.
    """
    if kind.startswith("Optional["):
        inner = kind.removeprefix("Optional[")[:-1]
        return None if value is None else ("optional", _written(value, inner, length, tensors))
    if kind.startswith("List["):
        inner = kind.removeprefix("List[")[:-1]
        items = value if isinstance(value, list) else [value] * (length or 0)
        if not items and not isinstance(value, list):
            raise _UnwritableError
        return [_written(item, inner, None, tensors) for item in items]
    if isinstance(value, dict):
        return _of_dict(value, kind, tensors)
    if kind in ("int", "SymInt") and type(value) is int and -(2**63) <= value < 2**63:
        return value
    if kind == "float" and type(value) in (int, float):
        return float(value)
    if kind in ("bool", "str") and type(value).__name__ == kind:
        return value
    raise _UnwritableError


def _of_dict(value: dict[str, Any], kind: str, tensors: int) -> Any:
    ((tag, content),) = value.items()
    if tag == "tensor" and kind == "Tensor":
        return (tag, content)
    if tag == "permuted" and kind == "Tensor":
        return (tag, content[0], tuple(content[1]))
    if tag in ("size", "minus") and kind in ("int", "SymInt"):
        return ("size", tensors - 1, content, 1 if tag == "size" else -1)
    if (tag, kind) in (("dtype", "ScalarType"), ("layout", "Layout"), ("memory_format", "MemoryFormat")):
        return (tag, content)
    if tag == "device" and kind == "Device" and content == "cpu":
        return (tag, content)
    raise _UnwritableError
