"""The operators of PyTorch that a file may call.

An exported graph calls PyTorch's own kernels, by name. A file may name any operator, and some do more than
calculate: they read or write files, or do not check their arguments.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from torch2ort._torch.dispatch import schema_of
from torch2ort.errors import ModelLoadError
from torch2ort.kernels.functions import decode_call
from torch2ort.kernels.index_check import decode_check
from torch2ort.pythonop import Site

_RETURNED = frozenset({"Tensor", "List[Tensor]"})
# Types of arguments that are values, without Optional and List.
_VALUES = frozenset({"Tensor", "int", "float", "bool", "number", "complex", "Device"})
# String arguments that select a way to calculate.
_MODES = frozenset(
    (
        "activation", "approximate", "driver", "equation", "indexing", "interpolation", "mode", "norm", "ord",
        "p", "pad_mode", "padding", "padding_side", "reduce", "rounding_mode", "side", "UPLO",
    )
)  # fmt: skip
_UNCHECKED = re.compile(
    r"unsafe(?!_view|_index|_split|_chunk)|^_nested_view|^segment_reduce|^_segment_reduce"
)


def check_kernel_call(site: Site) -> None:
    """Refuse a site of a file that does more than calculate with tensors.

    Args:
        site: calls ``AtenKernel``.

    Raises:
        ModelLoadError: names the operator.
    """
    _check_text(text_of(site))


def check_index_check(site: Site) -> None:
    """Refuse a site of a file that calls, for its error, an operator that does more than calculate.

    Args:
        site: calls ``IndexCheck``.

    Raises:
        ModelLoadError: names the operator.
    """
    check_index_text(text_of(site))


def check_region(site: Site) -> None:
    """Refuse a site of a file whose region does more than calculate with tensors.

    Args:
        site: calls ``FusedRegion``.

    Raises:
        ModelLoadError: names the operator.
    """
    from torch2ort.fusion.region import calls_of  # sympy is slow to import, and few files have regions

    for call in calls_of(text_of(site)):
        _check_text(call)


def check_index_text(text: str) -> None:
    """Refuse the text of an index check that calls an operator that does more than calculate.

    Raises:
        ModelLoadError: names the operator.
    """
    call = decode_check(text).call
    # _assert_async only raises.
    if schema_of(decode_call(call).operator).name != "aten::_assert_async":
        _check_text(call)


def text_of(site: Site) -> str:
    """Return the text that describes the call of a kernel.

    Raises:
        ModelLoadError: the site has no such text.
    """
    text = site.arguments[0] if site.arguments else None
    if not isinstance(text, str):
        raise ModelLoadError(
            f"PythonOp {site.func_name}: its first argument is {text!r}, not the call of an operator; "
            f"export the model again"
        )
    return text


@functools.lru_cache(maxsize=4096)
def _check_text(text: str) -> None:
    schema = schema_of(decode_call(text).operator)
    if not _calculates(schema):
        raise ModelLoadError(
            f"the model calls {schema.name}, which no file may call, as it does more than calculate with "
            f"tensors. If the model is yours, put the call into a torch.autograd.Function"
        )


def _calculates(schema: Any) -> bool:
    returned = [str(value.type) for value in schema.returns]
    return (
        bool(returned)
        and not schema.is_mutable
        and _RETURNED.issuperset(returned)
        and not _UNCHECKED.search(schema.name.partition("::")[2])
        and all(_is_value(argument) for argument in schema.arguments)
    )


def _is_value(argument: Any) -> bool:
    kind = re.sub(r"Optional|List|[\[\]]", "", str(argument.type))
    # An omitted generator means PyTorch's own.
    return kind in _VALUES or kind == "Generator" or (kind == "str" and argument.name in _MODES)
