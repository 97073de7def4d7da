"""A session that runs one call of a PyTorch operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper

from torch2ort.kernels.functions import AtenKernel, decode_call, encode_call
from torch2ort.pythonop.interception import internal_site
from torch2ort.pythonop.native import native
from torch2ort.pythonop.site import TENSOR, Result, TensorType
from torch2ort.runtime import stock
from torch2ort.runtime.custom_op.output_allocator import forget_output_sizes, lent_allocator
from torch2ort.runtime.ortvalues import bool_outputs, to_tensors, to_value

ELEMENTS = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int64: TensorProto.INT64,
    torch.bool: TensorProto.BOOL,
}


def in_python(text: str, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The results of the Function."""
    with torch.no_grad():
        return decode_call(text)(tensors)


class OneNode:
    """A session of one node.

    Args:
        function: the Function that the node calls.
        text: the Function's first argument, before the tensors.
        example: tensors with the types and ranks of the call's arguments.
        outputs: the Function's results for these.
        read: for each output, whether it is used.
    """

    def __init__(
        self,
        function: type[torch.autograd.Function],
        text: str,
        example: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        read: Sequence[bool] | None = None,
    ) -> None:
        self.text = text
        self._site = internal_site(
            function, [text, *[TENSOR] * len(example)], [False] * (1 + len(example)), training=False
        )
        self._site.result = Result(
            inputs=tuple(TensorType(t.dtype, t.dim()) for t in example),
            outputs=(TENSOR,) * len(outputs),
            tensors=tuple(TensorType(t.dtype, t.dim()) for t in outputs),
            returns_tuple=True,
        )
        named = read or [True] * len(outputs)
        self._slots = [f"y{i}" if name else "" for i, name in enumerate(named)]
        self._names = [name for name in self._slots if name]
        graph = self._graph(example, outputs)
        self._bools = bool_outputs(graph, self._names)
        self._callees = stock.bind_nodes(graph, {"call": self._site}, in_place=True)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        stock.register_library(options)
        forget_output_sizes(graph)
        with lent_allocator(options):
            model = helper.make_model(
                graph, opset_imports=[helper.make_opsetid("com.microsoft", 1)], ir_version=10
            )
            self._session = onnxruntime.InferenceSession(model.SerializeToString(), options)

    def _graph(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> onnx.GraphProto:
        def info(name: str, tensor: torch.Tensor) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(name, ELEMENTS[tensor.dtype], [None] * tensor.dim())

        node = helper.make_node(
            "PythonOp",
            [f"x{i}" for i in range(len(inputs))],
            ["context", *self._slots],
            "call",
            domain="com.microsoft",
            output_tensor_types=[ELEMENTS[t.dtype] for t in outputs],
            output_tensor_ranks=[t.dim() for t in outputs],
        )
        return helper.make_graph(
            [node],
            "one call",
            [info(f"x{i}", t) for i, t in enumerate(inputs)],
            [info(name, t) for name, t in zip(self._slots, outputs, strict=True) if name],
        )

    @property
    def is_direct(self) -> bool:
        """True if the node may run without Python."""
        return isinstance(self._callees[0], native.DirectCall)

    @property
    def site(self) -> native.Site:
        """The site that runs the call in Python."""
        (callee,) = self._callees
        return callee.site if isinstance(callee, native.DirectCall) else callee

    @property
    def python_calls(self) -> int:
        """Number of calls of Python."""
        return self.site.calls

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The results for these tensors.

        Raises:
            Exception: whatever the operator raises.
        """
        feeds = {f"x{i}": to_value(t.contiguous()) for i, t in enumerate(tensors)}
        try:
            found = self._session._sess.run_with_ort_values(feeds, self._names, None)
        except Exception as error:
            raise stock.take_error(error) or error from None
        return to_tensors(found, self._bools)


class OneCall(OneNode):
    """A session of one node that calls an operator of PyTorch.

    Args:
        operator: an overload.
        arguments: as :func:`encode_call` takes them.
        keywords: likewise.
        example: tensors with the types and ranks of the call's arguments.
        orders: as :func:`encode_call` takes them.
    """

    def __init__(
        self,
        operator: Any,
        arguments: Sequence[Any],
        example: Sequence[torch.Tensor],
        *,
        keywords: dict[str, Any] | None = None,
        orders: Sequence[Any] = (),
    ) -> None:
        text = encode_call(operator, arguments, keywords or {}, random=False, orders=orders)
        super().__init__(AtenKernel, text, example, in_python(text, example))
