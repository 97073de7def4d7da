"""The check of an index tensor: in a graph for training a call of Python, in any other ONNX operators.

Eager refuses what lies outside, each operator with an error of its own. ONNX counts negative indices from
the end, and ONNX Runtime has kernels that read whatever memory an index points to.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch.autograd import Function

from torch2ort.errors import ModelLoadError
from torch2ort.kernels.functions import decode_call

# In front of the message of a condition that eager's Python code raises a ValueError for.
VALUE_ERROR = "torch2ort ValueError: "
_DOMAIN = "torch2ort"
_NAME = "CheckedIndex"
CHECKED_INDEX = f"{_DOMAIN}::{_NAME}"
# What is a size only in name: numbers may be as large as there is memory for.
BOUNDLESS = 1 << 62
# An index that far below zero is outside of every tensor, and its sum with a small one too.
_FAR = {ir.DataType.INT64: 1 << 62, ir.DataType.INT32: 1 << 30}


@dataclass(frozen=True, slots=True)
class Check:
    """Which numbers an index tensor may hold.

    Attributes:
        call: eager's operator, as :func:`torch2ort.kernels.functions.encode_call` writes it.
        index: number of the index tensor among the call's tensors.
        source: number of the tensor that is indexed; ``None`` if :attr:`size` says how large it is.
        dim: which dimension of it; ``None`` for all elements.
        size: the first number that is too large, where there is no :attr:`source`.
        low: the smallest number; ``None`` for minus the size.
        ignored: a number that is allowed too.
        exact: whether what reads the index does not look at it itself, in ONNX Runtime.
    """

    call: str
    index: int
    source: int | None
    dim: int | None
    size: int | None
    low: int | None
    ignored: int | None
    exact: bool

    def to_json(self) -> str:
        """The text that :func:`decode_check` turns back."""
        return json.dumps(asdict(self), sort_keys=True)


@functools.lru_cache(maxsize=4096)
def decode_check(text: str) -> Check:
    """The check that ``text`` describes.

    Raises:
        ModelLoadError: it describes none.
    """
    try:
        check = Check(**json.loads(text))
        tensors = decode_call(check.call).tensors
        numbers = (check.source, check.dim, check.size, check.low, check.ignored)
        if type(check.index) is not int or not all(n is None or type(n) is int for n in numbers):
            raise ValueError("a number is none")
        if not (0 <= check.index < tensors and -1 < (check.source or 0) < tensors):
            raise ValueError("a tensor's number is too large")
        if check.source is None and check.size is None:
            raise ValueError("nothing is indexed")
    except (ValueError, TypeError) as error:
        raise ModelLoadError(f"not the check of an index: {text!r} ({error})") from None
    return check


def refuse_index(text: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise what eager raises if an index lies outside.

    Args:
        text: describes a :class:`Check`.
        tensors: those of its call.
    """
    check = decode_check(text)
    index = tensors[check.index]
    if check.source is None:
        size = check.size or 0
    else:
        source = tensors[check.source]
        size = source.numel() if check.dim is None else source.shape[check.dim]
    low = -size if check.low is None else check.low
    if _inside(index, low, size):
        return
    if check.ignored is not None and _inside(index[index != check.ignored], low, size):
        return
    # Eager's own operator raises eager's own error.
    try:
        decode_call(check.call)(tensors)
    except RuntimeError as error:
        if str(error).startswith(VALUE_ERROR):
            raise ValueError(str(error).removeprefix(VALUE_ERROR)) from None
        raise


def _inside(index: torch.Tensor, low: int, size: int) -> bool:
    if not index.numel():
        return True
    smallest, largest = torch.aminmax(index)
    return low <= int(smallest) and int(largest) < size


class IndexCheck(Function):
    """The same indices; eager's error if one lies outside."""

    @staticmethod
    def forward(ctx: Any, text: str, *tensors: torch.Tensor) -> torch.Tensor:
        """A copy of the index tensor.

        Args:
            ctx: the context.
            text: describes a :class:`Check`.
            tensors: those of its call.
        """
        index = tensors[decode_check(text).index]
        # While a graph is made, tensors are of a class that holds no numbers.
        if type(index) is torch.Tensor:
            refuse_index(text, tensors)
        result = index.clone(memory_format=torch.contiguous_format)
        ctx.mark_non_differentiable(result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:
        """Indices have no gradient."""
        return (None,) * len(ctx.needs_input_grad)


def define_checks(model: ir.Model, opset: int) -> None:
    """Give ``model`` a local function for each check in it, so that any runtime can run it.

    The function moves negative indices so far away that the operator which reads them refuses them, or
    looks each up in a table of the allowed ones. Its documentation is the check's text.
    """
    known: dict[tuple[str, int, ir.DataType], str] = {}
    for node in model.graph:
        if node.domain != _DOMAIN or node.op_type != _NAME:
            continue
        text = node.attributes.pop("check").as_string()
        index = node.inputs[0]
        assert index is not None
        assert index.dtype is not None
        key = (text, len(node.inputs), index.dtype)
        if key not in known:
            known[key] = f"{_NAME}_{len(known)}"
            function = _function(known[key], decode_check(text), len(node.inputs), index.dtype, opset)
            function.doc_string = text
            model.functions[function.identifier()] = function
            model.opset_imports[_DOMAIN] = 1
        node.op_type = known[key]


def _function(name: str, check: Check, inputs: int, dtype: ir.DataType, opset: int) -> ir.Function:
    values = [ir.Value(name=f"x{i}") for i in range(inputs)]
    body = _Body(dtype)
    result = body.op("Identity", _checked(body, check, values))
    graph = ir.Graph(values, [result], nodes=body.nodes, opset_imports={"": opset}, name=name)
    return ir.Function(_DOMAIN, name, graph=graph, attributes=[])


def _checked(body: _Body, check: Check, values: Sequence[ir.Value]) -> ir.Value:
    index, tensors = values[0], values[1:]
    if check.low is None:
        # ONNX's Gather counts from the end, too, and looks how far.
        return _looked_up(body, check, tensors, index) if check.exact else index
    distance = index if check.low == 0 else body.op("Sub", index, body.number(check.low))
    wrong = body.op("Less", distance, body.number(0))
    if check.ignored is not None:
        allowed = body.op("Equal", index, body.number(check.ignored))
        wrong = body.op("And", wrong, body.op("Not", allowed))
    if check.size == BOUNDLESS and check.exact:
        # There is no table of so many, but one of a single zero.
        place = body.op("Where", wrong, body.number(-_FAR[body.dtype]), body.number(0))
        table = body.op("Range", body.number(0), body.number(1), body.number(1))
        return body.op("Add", index, body.op("Gather", table, place))
    far = body.op("Sub", distance, body.number(_FAR[body.dtype]))
    moved = body.op("Where", wrong, far, distance)
    return _looked_up(body, check, tensors, moved) if check.exact else moved


def _looked_up(body: _Body, check: Check, tensors: Sequence[ir.Value], index: ir.Value) -> ir.Value:
    """The number at a place among those that are allowed."""
    if check.source is None:
        size = body.number(check.size or 0)
    elif check.dim is None:
        size = body.op("Cast", body.op("Size", tensors[check.source]), to=int(body.dtype))
    else:
        shape = body.op("Shape", tensors[check.source])
        size = body.op("Cast", body.op("Gather", shape, body.number(check.dim)), to=int(body.dtype))
    table = body.op("Range", body.number(check.low or 0), size, body.number(1))
    return body.op("Gather", table, index)


class _Body:
    """The nodes of a function."""

    def __init__(self, dtype: ir.DataType) -> None:
        self.nodes: list[ir.Node] = []
        self.dtype = dtype

    def op(self, name: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        made = [ir.AttrInt64(key, value) for key, value in attributes.items()]
        node = ir.Node("", name, list(inputs), made, num_outputs=1, name=f"node_{len(self.nodes)}")
        node.outputs[0].name = f"v{len(self.nodes)}"
        self.nodes.append(node)
        return node.outputs[0]

    def number(self, value: int) -> ir.Value:
        made = self.op("Constant")
        (node,) = self.nodes[-1:]
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(value, dtype=self.dtype))
        return made
