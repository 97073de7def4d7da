"""Calls of PyTorch's kernels that a node can make in C++, without Python.

The extension calls operators through the C interface that torch keeps stable for compiled models (see
``runtime_ext/direct/``). This module decides which calls that interface supports, and encodes their
arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch2ort._torch import dispatch as private
from torch2ort.kernels.functions import READ_GRAD_MODE, OperatorCall, decode_call


@dataclass(frozen=True)
class DirectArguments:
    """The arguments of the extension's ``DirectCall``, besides its site.

    Attributes:
        operator: its name with the namespace.
        overload: its name; ``""`` for the default one.
        arguments: one per argument of the schema, or only the tensors if there is a function.
        results: for each, whether it is computed, and the order of its dimensions, empty if it is not
            permuted.
        function: the function of the C interface to call instead of the dispatcher; ``""`` for none.
        numbers: the numbers that this function takes.
        written: the argument that determines the sizes of a result that is written to the runtime's memory,
            which is the tensor after those of the site: ``("like", i)``, or ``("product", i)`` for the
            product of that matrix and the next; ``None`` for results with their own memory.
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
    """The C interface does not support an argument."""


# Functions for operators that take Scalars, which the dispatcher's C interface does not support.
_FUNCTIONS = {
    "aten::add.Tensor": "aoti_torch_cpu_add_Tensor",
    "aten::mul.Scalar": "aoti_torch_cpu_mul_Scalar",
    "aten::pow.Tensor_Scalar": "aoti_torch_cpu_pow_Tensor_Scalar",
}
# Functions that write their result to the first tensor.
_WRITING_FUNCTIONS = {
    "aten::addmm": "aoti_torch_cpu_addmm_out",
    "aten::baddbmm": "aoti_torch_cpu_baddbmm_out",
}
# Functions for operators whose tensor argument is a Python number.
_WITH_NUMBER = {
    "aten::add.Tensor": "aoti_torch_cpu_add_Scalar",
    "aten::mul.Tensor": "aoti_torch_cpu_mul_Scalar",
}
# Operators whose kernel can write to given memory -> that overload, and the source of the result's sizes. The
# runtime's memory is reused from node to node and step to step. torch's memory comes from the heap, which
# returns large blocks to the system; a new block's pages must be mapped again.
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
    """Return the arguments for the call that ``text`` describes in C++; ``None`` if C++ does not support it.

    Args:
        text: as for :func:`~torch2ort.kernels.functions.decode_call`.
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


def _given(call: OperatorCall) -> list[tuple[Any, Any]]:
    """Return each argument of the schema with its value in the call, defaults included."""
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
    call: OperatorCall,
    given: Sequence[tuple[Any, Any]],
    dtypes: Sequence[torch.dtype],
    results: list[tuple[bool, tuple[int, ...]]],
) -> DirectArguments:
    """Return a call with numbers as a call of a function of the C interface.

    The function takes numbers as floats, which makes no difference if all tensors are floating-point.
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
    """Return the same call with its result written to the runtime's memory, if its kernel supports that."""
    overload, written = _WRITING_OVERLOADS.get(direct.operator, ("", None))
    ordered = any(order for _, order in direct.results)
    if direct.overload or written is None or ordered or not _is_of_one_type(direct, dtypes):
        return direct
    if written[0] == "like" and any(isinstance(a, tuple) and a[0] == "permuted" for a in direct.arguments):
        # oneDNN's kernels require the same memory layout for the result and the arguments.
        return direct
    arguments = [*direct.arguments, ("tensor", len(dtypes))]
    return replace(direct, overload=overload, arguments=arguments, written=written)


def _is_of_one_type(direct: DirectArguments, dtypes: Sequence[torch.dtype]) -> bool:
    """Return True if the tensors of a call, and so its result, are of one floating-point type."""
    named = {str(a[1]) for a in direct.arguments if isinstance(a, tuple) and a[0] == "dtype"}
    names = {str(dtype).removeprefix("torch.") for dtype in dtypes} | named
    return len(names) == 1 and all(dtype.is_floating_point for dtype in dtypes)


def _written(value: Any, kind: str, length: int | None, tensors: int) -> Any:
    """Return an argument in the extension's form.

    Args:
        value: the argument in the text of a call.
        kind: its type in the schema.
        length: the length of a list for which a single number may be given.
        tensors: the number of the call's tensors; the last one may be the one of which only sizes are read.
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
