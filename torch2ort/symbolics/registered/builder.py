"""``g``, which adds nodes to the graph that is being exported, on behalf of a user's exporter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np
import onnx
import onnx_ir as ir
import sympy
import torch
from onnx_shape_inference import OpUsageError, ShapeInferenceContext, ShapeInferenceError, registry

from torch2ort.errors import ExportError
from torch2ort.log import logger
from torch2ort.program.target import Target
from torch2ort.pythonop import ONNX_TYPES
from torch2ort.symbolics.registered.schema import OperatorSchema
from torch2ort.symbolics.registered.values import GraphValue


class GraphBuilder:
    """Builder of the nodes that replace one call.

    Attributes:
        training: the mode that is exported.
        opset: the graph's version of ONNX's own operators.
    """

    def __init__(self, who: str, names: Mapping[str, sympy.Expr], target: Target) -> None:
        self.training = target.training
        self.opset = target.opset
        self._target = target
        self._who = who
        self._names = names
        self._nodes: list[ir.Node] = []

    def can_run(self, node: onnx.NodeProto, inputs: Mapping[str, int], outputs: Mapping[str, int]) -> bool:
        """Return True if the installed onnxruntime has a kernel for ``node`` on the CPU.

        Args:
            node: a node with all its attributes.
            inputs: ONNX element type of each input, by name.
            outputs: ONNX element type of each output, by name.
        """
        return self._target.can_run(node, inputs, outputs)

    @overload
    def op(self, name: str, *inputs: Any, outputs: Literal[1] = 1, **attributes: Any) -> GraphValue: ...
    @overload
    def op(self, name: str, *inputs: Any, outputs: int, **attributes: Any) -> tuple[GraphValue, ...]: ...
    def op(
        self, name: str, *inputs: Any, outputs: int = 1, **attributes: Any
    ) -> GraphValue | tuple[GraphValue, ...]:
        """Add one node.

        Args:
            name: ``"Relu"`` for one of ONNX's own operators, ``"com.microsoft::Gelu"`` for another.
            inputs: values of this graph; ``None`` for one that is absent; a Python number, bool or
                ``torch.Tensor`` becomes a constant, and a number has the type of the inputs that the
                operator's schema ties it to.
            outputs: number of the node's outputs.
            attributes: attributes of the node: numbers, strings, lists of them, a ``torch.dtype``, or a
                ``torch.Tensor``. Those that are ``None`` are left out.

        Returns:
            The output; a tuple of them where ``outputs`` is not 1.

        Raises:
            ExportError: an input is no value of this graph, or ONNX does not have the operator, or not
                with these inputs, outputs or attributes.
        """
        domain, _, op_type = name.rpartition("::")
        own = domain in ("", "ai.onnx")
        schema = OperatorSchema(op_type, self.opset, self._who) if own else None
        arguments = list(inputs)
        while arguments and arguments[-1] is None:
            arguments.pop()
        if schema is not None:
            schema.check_counts(len(arguments), outputs)
        values = self._values(name, arguments, schema)
        node = ir.Node(
            "" if own else domain,
            op_type,
            values,
            [self._attribute(name, k, v, schema) for k, v in attributes.items() if v is not None],
            num_outputs=outputs,
            version=self.opset if own else 1,
        )
        self._nodes.append(node)
        self._infer(node)
        made = tuple(self.wrap(value) for value in node.outputs)
        return made[0] if outputs == 1 else made

    def constant(self, value: Any, dtype: torch.dtype | None = None) -> GraphValue:
        """Add a constant: a number, a (nested) list of numbers, an array or a tensor.

        Args:
            value: Python floats become float32, ints int64, bools bool.
            dtype: element type, if another is needed.
        """
        tensor = value.detach().cpu() if isinstance(value, torch.Tensor) else torch.as_tensor(value)
        if tensor.dtype == torch.float64 and not isinstance(value, (torch.Tensor, np.ndarray)):
            tensor = tensor.to(torch.float32)
        return self.wrap(self._constant(tensor if dtype is None else tensor.to(dtype)))

    def wrap(self, value: ir.Value) -> GraphValue:
        """Return ``value`` as a value of this builder."""
        return GraphValue(value, self, self._names)

    def unwrap(self, value: GraphValue, where: str) -> ir.Value:
        """Return the graph's value behind ``value``.

        Raises:
            ExportError: it belongs to another builder.
        """
        if value._owner is not self:
            raise ExportError(
                f"{self._who}: {where} is a value of another call's graph, {value!r}; expected an argument "
                f"of this call, or what this g made"
            )
        return value._value

    @property
    def nodes(self) -> list[ir.Node]:
        """The nodes added so far, in order."""
        return self._nodes

    def _values(
        self, name: str, arguments: Sequence[Any], schema: OperatorSchema | None
    ) -> list[ir.Value | None]:
        given = [
            self.unwrap(a, f"input {i} of g.op({name!r})") if isinstance(a, GraphValue) else None
            for i, a in enumerate(arguments)
        ]
        types = [
            None if v is None else v.dtype for v in given
        ]  # fmt: skip
        for i, argument in enumerate(arguments):
            if argument is None or given[i] is not None:
                continue
            if isinstance(argument, torch.Tensor):
                given[i] = self._constant(argument.detach().cpu())
            elif isinstance(argument, (bool, int, float)):
                given[i] = self._number(argument, i, types, schema)
            else:
                raise ExportError(
                    f"{self._who}: input {i} of g.op({name!r}) is {argument!r}; expected a graph value, a "
                    f"number, a bool, a torch.Tensor or None. Use g.constant for lists and arrays"
                )
        return given

    def _number(
        self, number: float, position: int, types: Sequence[ir.DataType | None], schema: OperatorSchema | None
    ) -> ir.Value:
        if schema is None:
            dtype = next((t for t in types if t is not None), None)
        else:
            dtype = schema.constant_type(position, number, types)
        natural = torch.as_tensor(number)
        if dtype is None:
            return self._constant(natural.to(torch.float32) if isinstance(number, float) else natural)
        wanted = next(t for t, code in ONNX_TYPES.items() if code == int(dtype))
        return self._constant(torch.tensor(number, dtype=wanted))

    def _constant(self, tensor: torch.Tensor) -> ir.Value:
        node = ir.Node(
            "", "Constant", [], [ir.AttrTensor("value", ir.tensor(tensor.contiguous()))], num_outputs=1
        )
        node.outputs[0].dtype = ir.DataType(ONNX_TYPES[tensor.dtype])
        node.outputs[0].shape = ir.Shape(tensor.shape)
        self._nodes.append(node)
        return node.outputs[0]

    def _attribute(self, name: str, key: str, value: Any, schema: OperatorSchema | None) -> ir.Attr:
        if isinstance(value, torch.dtype):
            value = ONNX_TYPES[value]
        elif isinstance(value, torch.Tensor):
            return ir.AttrTensor(key, ir.tensor(value.detach().cpu().contiguous()))
        elif schema is not None:
            value = schema.attribute(key, value)
        try:
            return ir.convenience.convert_attribute(key, value)
        except (TypeError, ValueError) as error:
            raise ExportError(
                f"{self._who}: attribute {key} of g.op({name!r}) is {value!r}, which a graph cannot hold "
                f"({error})"
            ) from error

    def _infer(self, node: ir.Node) -> None:
        """Infer types and shapes of a new node's outputs, as far as there is a rule."""
        registry.collect()
        version = 1 if node.domain else self.opset
        rule = registry.get(node.domain, node.op_type, version=version)
        if rule is None:
            return
        context = ShapeInferenceContext({"": self.opset, node.domain: version})
        try:
            rule(context, node)
        except (OpUsageError, ShapeInferenceError) as error:
            raise ExportError(f"{self._who}: {error}") from error
        except Exception as error:
            logger.debug("%s: no shapes for %s (%s)", self._who, node.op_type, error)
