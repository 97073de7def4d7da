"""Refusal of tensors that no ONNX graph can represent: sparse, nested, quantised, and of some dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir
import torch

from torch2ort.errors import UnsupportedOperatorError
from torch2ort.pythonop import ONNX_TYPES, makes_quantised, site_by_key
from torch2ort.support.provenance import fx_name, line_of, operator_of, source_line

_PYTHON_OP = torch.ops.torch2ort.python_op.default
_INSIDE = "Put all that computes with it into one torch.autograd.Function, which keeps PyTorch's kernels"
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def refuse_unrepresentable(program: torch.export.ExportedProgram) -> None:
    """Refuse a program in which such a tensor is passed from one operator or Function to another.

    Complex numbers are pairs of real ones in a graph, so a Function or the reader of an output would get the
    pairs.

    Args:
        program: the result of torch.export, with calls of Functions as opaque operators.

    Raises:
        UnsupportedOperatorError: with the operator or Function, its line, and what to do.
    """
    for node in program.graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is _PYTHON_OP:
            inputs, key = node.args
            name = site_by_key(key).func_name
            _refuse(name, node, "reads", inputs, "Pass it {} and convert that back inside of it")
            _refuse(name, node, "returns", [node], "Return {} and convert that back after the call")
        else:
            _refuse(str(node.target), node, "returns", [node], _INSIDE)
    for value in program.graph_module.graph.output_node().args[0]:
        if isinstance(value, torch.fx.Node):
            _refuse_complex(value)


def refuse_unrepresentable_weights(program: torch.export.ExportedProgram) -> None:
    """Refuse a program whose operators read a parameter, buffer or constant that is sparse.

    Raises:
        UnsupportedOperatorError: with the first reader's line, and what to do.
    """
    for node in program.graph.nodes:
        readers = [user for user in node.users if user.target is not _PYTHON_OP]
        if node.op == "placeholder" and readers:
            for layout in (t.layout for t in _tensors(node) if t.layout is not torch.strided):
                raise UnsupportedOperatorError(
                    f"{readers[0].target} at {source_line(readers[0])} reads a tensor of the model's in the "
                    f"layout {layout}, which a graph cannot hold. Keep x.to_dense() in its place, or keep it "
                    f"in a torch.autograd.Function that computes with it"
                )


def _refuse(name: str, node: torch.fx.Node, verb: str, values: Sequence[torch.fx.Node], remedy: str) -> None:
    for maker, tensor in ((value, t) for value in values for t in _tensors(value)):
        what, instead = _unheld(tensor, of_function=node.target is _PYTHON_OP)
        # A trace assumes that these return plain numbers.
        if makes_quantised(maker.target):
            what, instead = "that is quantised", "x.dequantize()"
        if what:
            raise UnsupportedOperatorError(
                f"{name} at {source_line(node)} {verb} a tensor {what}, which cannot go from one node of an "
                f"ONNX graph to another. {remedy.format(instead)}"
            )


def _refuse_complex(value: torch.fx.Node) -> None:
    for tensor in _tensors(value):
        if tensor.is_complex():
            raise UnsupportedOperatorError(
                f"the model returns {tensor.dtype} ({value.name} at {source_line(value)}), but outputs of an "
                f"ONNX graph are real numbers. Return torch.view_as_real(x), and apply "
                f"torch.view_as_complex to the result of the call"
            )


def refuse_complex_arguments(node: torch.fx.Node) -> None:
    """Refuse an operator for PyTorch's kernel with complex arguments, which a graph represents by pairs.

    Raises:
        UnsupportedOperatorError: with its line, and what to do.
    """
    if any(tensor.is_complex() for value in node.all_input_nodes for tensor in _tensors(value)):
        raise _no_pairs(node)


def refuse_complex_values(model: ir.Model, program: torch.export.ExportedProgram) -> None:
    """Refuse a translation with complex values, which ONNX's operators do not accept.

    torch.onnx creates them from a number next to complex tensors, and from tensors that are created as
    complex (``torch.ones(2, dtype=torch.complex64)``).

    Raises:
        UnsupportedOperatorError: with the operator's line, and what to do.
    """
    nodes = {node.name: node for node in program.graph.nodes}
    for made in ir.traversal.RecursiveGraphIterator(model.graph):
        if any(kind in (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128) for kind in _types_of(made)):
            raise _no_pairs(nodes.get(fx_name(made)))


def _types_of(node: ir.Node) -> Iterator[ir.DataType | None]:
    """Yield the types of a node's values and attributes, which may contradict each other."""
    for value in (*node.inputs, *node.outputs):
        if value is not None:
            yield value.dtype if value.const_value is None else value.const_value.dtype
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
            yield attribute.as_tensor().dtype
    if node.op_type == "Cast" and not node.domain:
        yield ir.DataType(node.attributes["to"].as_int())


def refuse_complex_weight(value: ir.Value, tensor: torch.Tensor) -> None:
    """Refuse a complex weight: a session is fed with it unchanged, and its readers expect pairs.

    Args:
        value: the graph's input that is fed with it.
        tensor: the weight.

    Raises:
        UnsupportedOperatorError: with a reader, its line, and what to do.
    """
    if tensor.is_complex() and value.uses():
        reader = next(iter(value.uses())).node
        raise UnsupportedOperatorError(
            f"{operator_of(reader)} at {line_of(reader)} reads a tensor of the model's of "
            f"{tensor.dtype}, of which an ONNX graph has pairs of real numbers. Keep torch.view_as_real(x) "
            f"in its place, and call torch.view_as_complex of it in forward"
        )


def _no_pairs(node: torch.fx.Node | None) -> UnsupportedOperatorError:
    where = "an unknown line of the model" if node is None else source_line(node)
    return UnsupportedOperatorError(
        f"an operator at {where} computes with complex numbers, of which an ONNX graph has "
        f"pairs of real ones, and ONNX has none for these. {_INSIDE}"
    )


def _tensors(node: torch.fx.Node) -> Iterator[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return (v for v in values if isinstance(v, torch.Tensor))


def _unheld(tensor: torch.Tensor, *, of_function: bool) -> tuple[str, str]:
    """Return the reason why a graph cannot represent a tensor, and a conversion; empty texts if it can."""
    if tensor.layout is not torch.strided:
        return f"in the layout {tensor.layout}", "x.to_dense()"
    if tensor.is_quantized:
        return "that is quantised", "x.dequantize()"
    if tensor.dtype not in ONNX_TYPES:
        return f"of {tensor.dtype}", f"x.view({_SAME_SIZE[tensor.dtype.itemsize]})"
    if of_function and tensor.is_complex():
        return f"of {tensor.dtype}", "torch.view_as_real(x)"
    return "", ""
