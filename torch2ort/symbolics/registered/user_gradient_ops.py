"""Calls whose ONNX operators have gradients that users registered, for engines that differentiate a program.

Such a call is an opaque operator of a program, and so is its derivative. The first is translated by the
call's own translation, the second by the registered gradients.
"""

from __future__ import annotations

import base64
import itertools
import json
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import torch

from torch2ort._torch import onnx_exporter as private
from torch2ort.symbolics.graph_builder import constant, op
from torch2ort.symbolics.registered.exporter_calls import WRITTEN_BY_USERS
from torch2ort.symbolics.registered.gradient_definitions import (
    GradientAttribute,
    GradientDefinition,
    gradient_of,
)

_library = torch.library.Library("torch2ort", "FRAGMENT")
_library.define("mapped_call(Tensor[] inputs, str call) -> Tensor[]")
_library.define("mapped_call_grad(Tensor[] inputs, Tensor[] outputs, Tensor[] grads, str call) -> Tensor[]")
MAPPED_CALL = torch.ops.torch2ort.mapped_call.default
MAPPED_CALL_GRAD = torch.ops.torch2ort.mapped_call_grad.default

_OF_NODE = re.compile(r"(I|O|GO)\((\d+)\)$")
_serial = itertools.count()


class MappedCall:
    """One call of a program as ONNX operators with registered gradients; found by its key while it lives.

    Args:
        model: the operators; its inputs are the call's.
        needed: for each input, True if it may require a gradient.
        fake: the call itself, for tensors without data.

    Attributes:
        key: the call's name in a program.
    """

    def __init__(
        self, model: ir.Model, needed: Sequence[bool], fake: Callable[[Sequence[torch.Tensor]], Any]
    ) -> None:
        self.key = f"mapped_call_{next(_serial)}"
        self.fake = fake
        self.needed = tuple(needed)
        self._model = model
        self._graph = model.graph
        self._opset = model.opset_imports[""]
        self._carrying = _gradient_nodes(model, self._needed_names())
        _calls[self.key] = self

    def to_json(self) -> dict[str, Any]:
        """Return the call as JSON, without ``fake``."""
        model = ir.to_proto(self._model).SerializeToString()
        return {"model": base64.b64encode(model).decode(), "needed": list(self.needed)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], results: Sequence[torch.Tensor]) -> MappedCall:
        """Load the result of :meth:`to_json`, with the gradients that are registered in this process.

        Args:
            data: the result of :meth:`to_json`.
            results: the results of the call, without data.
        """
        model = ir.from_proto(onnx.load_from_string(base64.b64decode(data["model"])))
        return cls(model, data["needed"], lambda tensors: results)

    @property
    def is_registered(self) -> bool:
        """True if all operators that a gradient passes through have a registered gradient.

        Raises:
            ExportError: the registered callable returned no gradient.
        """
        found = [(gradient_of(node), inputs) for node, inputs in self._carrying]
        return bool(found) and all(d is not None and d.inputs >= inputs for d, inputs in found)

    def _needed_names(self) -> frozenset[str]:
        return frozenset(
            str(v.name) for v, needed in zip(self._graph.inputs, self.needed, strict=True) if needed
        )

    def translate(self, inputs: Sequence[ir.Value]) -> list[ir.Value]:
        """Return the call's outputs, by nodes added to the translation in progress."""
        copied = _Copied(self._opset, dict(zip(self._graph.inputs, inputs, strict=True)))
        found: list[ir.Value] = []
        for output in self._graph.outputs:
            value = copied.value(output)
            # The translation names its outputs, so none may be a value that already exists.
            taken = value in found or any(value is given for given in inputs)
            found.append(op("Identity", value) if taken else value)
        return found

    def translate_backward(
        self, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], grads: Sequence[ir.Value]
    ) -> list[ir.Value]:
        """Return the gradients of the inputs that may require one, by nodes added to the translation."""
        known = dict(zip(self._graph.inputs, inputs, strict=True))
        known.update(zip(self._graph.outputs, outputs, strict=True))
        copied = _Copied(self._opset, known)
        found: dict[ir.Value, ir.Value] = dict(zip(self._graph.outputs, grads, strict=True))
        for node, carrying in reversed(self._carrying):
            definition = gradient_of(node)
            assert definition is not None
            given = [found.get(v) or _zeros(copied.value(v)) for v in node.outputs]
            for position, value in copied.gradients(node, definition, given).items():
                source = node.inputs[position]
                if position in carrying and source is not None:
                    found[source] = op("Add", found[source], value) if source in found else value
        return [
            op("Identity", found[v]) if v in found else _zeros(given)
            for v, given, needed in zip(self._graph.inputs, inputs, self.needed, strict=True)
            if needed
        ]


_calls: weakref.WeakValueDictionary[str, MappedCall] = weakref.WeakValueDictionary()


def mapped_call(key: str) -> MappedCall:
    """Return the live call with the key ``key``; raise ``KeyError`` if it is gone."""
    return _calls[key]


class _Copied:
    """Copies of the nodes of a call's graph in another graph.

    Args:
        opset: opset of the call's graph.
        known: values of the call's graph -> values of the other graph.
    """

    def __init__(self, opset: int, known: dict[ir.Value, ir.Value]) -> None:
        self._opset, self._known = opset, known

    def value(self, value: ir.Value) -> ir.Value:
        """Return the copy of a value of the call's graph."""
        if value not in self._known:
            node = value.producer()
            if node is None:
                assert value.const_value is not None
                self._known[value] = self._constant(value.const_value)
            else:
                given = [None if v is None else self.value(v) for v in node.inputs]
                made = self._add(
                    node.domain, node.op_type, given, list(node.attributes.values()), len(node.outputs)
                )
                for old, new in zip(node.outputs, made, strict=True):
                    new.type, new.shape = old.type, old.shape
                    self._known[old] = new
        return self._known[value]

    def gradients(
        self, node: ir.Node, definition: GradientDefinition, grads: Sequence[ir.Value]
    ) -> Mapping[int, ir.Value]:
        """Return position of an input of ``node`` -> its gradient, by the registered definition."""
        made: dict[str, ir.Value | None] = {"": None}

        def named(name: str) -> ir.Value | None:
            own = _OF_NODE.match(name)
            if own is None:
                return made[name]
            position = int(own[2])
            if own[1] == "GO":
                return grads[position]
            source = (node.inputs if own[1] == "I" else node.outputs)[position]
            return None if source is None else self.value(source)

        first = node.inputs[0].dtype if node.inputs and node.inputs[0] is not None else None
        for part in definition.nodes:
            attributes = [_attribute(a, first) for a in part.attributes]
            results = self._add(
                part.domain, part.op_type, list(map(named, part.inputs)), attributes, len(part.outputs)
            )
            made.update(zip(part.outputs, results, strict=True))
        found: dict[int, ir.Value] = {}
        for position in definition.inputs:
            value, source = made[f"GI({position})"], node.inputs[position]
            assert value is not None
            assert source is not None
            value.type, value.shape = source.type, source.shape
            found[position] = value
        return found

    def _constant(self, tensor: ir.TensorProtocol) -> ir.Value:
        made = self._add("", "Constant", [], [ir.AttrTensor("value", tensor)], 1)[0]
        made.dtype, made.shape = tensor.dtype, ir.Shape(tensor.numpy().shape)
        return made

    def _add(
        self, domain: str, name: str, inputs: list[ir.Value | None], attributes: list[ir.Attr], outputs: int
    ) -> Sequence[ir.Value]:
        version = 1 if domain else self._opset
        node = ir.Node(domain, name, inputs, attributes, num_outputs=outputs, version=version)
        node.meta[WRITTEN_BY_USERS] = True
        private.recorded_nodes().append(node)
        return node.outputs


def _attribute(attribute: GradientAttribute, first: ir.DataType | None) -> ir.Attr:
    value = json.loads(attribute.json)
    if not attribute.is_tensor:
        return ir.convenience.convert_attribute(attribute.name, value)
    dtype = first if attribute.dtype.startswith("IElemType") else ir.DataType.INT64
    return ir.AttrTensor(attribute.name, ir.tensor(value, dtype=dtype))


def _zeros(like: ir.Value) -> ir.Value:
    return op("Expand", constant(0, like.dtype), op("Shape", like))


def translations() -> dict[Any, Callable[..., Any]]:
    """Return the translations of the two operators."""
    return {
        MAPPED_CALL: lambda inputs, call: _calls[call].translate(list(inputs)),
        MAPPED_CALL_GRAD: lambda inputs, outputs, grads, call: _calls[call].translate_backward(
            list(inputs), list(outputs), list(grads)
        ),
    }


@torch.library.register_fake("torch2ort::mapped_call", lib=_library)
def _fake_call(inputs: Sequence[torch.Tensor], call: str) -> list[torch.Tensor]:
    found = _calls[call].fake(inputs)
    return [torch.empty_like(t) for t in (found if isinstance(found, (list, tuple)) else (found,))]


@torch.library.register_fake("torch2ort::mapped_call_grad", lib=_library)
def _fake_gradients(
    inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], call: str
) -> list[torch.Tensor]:
    needed = _calls[call].needed
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format)
        for t, n in zip(inputs, needed, strict=True)
        if n
    ]


def _note(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    tensors, ctx.call = inputs
    ctx.count = len(tensors)
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, None]:
    tensors, outputs = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
    given = [torch.zeros_like(o) if g is None else g for o, g in zip(outputs, grads, strict=True)]
    found = iter(MAPPED_CALL_GRAD(list(tensors), list(outputs), given, ctx.call))
    return [next(found) if needed else None for needed in _calls[ctx.call].needed], None


torch.library.register_autograd("torch2ort::mapped_call", _differentiate, setup_context=_note, lib=_library)


def _gradient_nodes(model: ir.Model, trained: frozenset[str]) -> list[tuple[ir.Node, frozenset[int]]]:
    """Return the nodes that a gradient passes through, with the positions of the inputs that carry it."""
    graph = model.graph
    carrying = {v for v in (*graph.inputs, *graph.initializers.values()) if v.name in trained}
    found: list[tuple[ir.Node, frozenset[int]]] = []
    for node in graph:
        inputs = frozenset(i for i, v in enumerate(node.inputs) if v in carrying)
        outputs = [v for v in node.outputs if v.dtype is None or v.dtype.is_floating_point()]
        if inputs and outputs:
            found.append((node, inputs))
            carrying.update(outputs)
    # A node is differentiated only if it also reaches an output.
    wanted = set(graph.outputs)
    reaching: list[tuple[ir.Node, frozenset[int]]] = []
    for node, inputs in reversed(found):
        if any(v in wanted for v in node.outputs):
            wanted.update(v for v in node.inputs if v is not None)
            reaching.append((node, inputs))
    return reaching[::-1]
