"""Views that are valid for some strides only, and sizes that are read off strides."""

from __future__ import annotations

import operator
from typing import NoReturn

import torch

from torch2ort._torch.dispatch import OpOverload
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.kernels.recurrent import is_recurrent
from torch2ort.program import internal_ops
from torch2ort.program.alias_analysis import written_by
from torch2ort.program.dim_order import order_of_memory
from torch2ort.program.kernel_sites import is_random
from torch2ort.pythonop import site_by_key
from torch2ort.sizes.symbols import size_hint
from torch2ort.support.provenance import source_line

aten = torch.ops.aten
# These operators get the memory order of their tensors' elements as an argument.
_DROPOUTS = frozenset({internal_ops.dropout, internal_ops.dropout_noise})
# These draw for a tensor of their own, one number for each channel.
_DRAW_FOR_CHANNELS = frozenset({aten.feature_alpha_dropout_.default, aten.feature_dropout_.default})
_PYTHON_OP = torch.ops.torch2ort.python_op.default
# Operators whose results have another memory layout in a trace than with PyTorch's CPU kernels, which return
# contiguous ones; for the first set, channels-last if the input is.
_AS_SUGGESTED = frozenset({aten.batch_norm.default, aten.channel_shuffle.default, aten.roll.default})
_CONTIGUOUS = frozenset({aten.log_sigmoid.default})
_CHANNELS_LAST = {(0, 2, 3, 1): torch.channels_last, (0, 2, 3, 4, 1): torch.channels_last_3d}


def loosen_views(program: torch.export.ExportedProgram) -> None:
    """Replace a view by a reshape, which copies where another memory layout requires it.

    A kernel's result may have another memory layout when the program is decomposed than in the trace, where
    it was assumed to be contiguous. A view of memory that a node writes to is kept.
    """
    written = {_root(value) for node in program.graph_module.graph.nodes for value in _written(node)}
    for node in program.graph_module.graph.nodes:
        if node.target is aten.view.default and _root(node) not in written:
            node.target = aten.reshape.default


def read_in_order_of_memory(program: torch.export.ExportedProgram) -> None:
    """Make ``as_strided`` read the values of a graph in eager PyTorch's memory layout.

    A tensor with permuted dimensions is permuted back first, since every value of a graph is contiguous.

    Raises:
        UnsupportedOperatorError: see :func:`refuse_unreadable_memory`.
    """
    graph = program.graph_module.graph
    refuse_unreadable_memory(graph)
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        value = node.args[0].meta["val"]
        order = order_of_memory(value)
        if order is not None and order != sorted(order):
            with graph.inserting_before(node):
                lying = graph.call_function(aten.permute.default, (node.args[0], order))
            lying.meta = {**node.args[0].meta, "val": value.permute(order)}
            node.args = (lying, *node.args[1:])


def refuse_unreadable_memory(graph: torch.fx.Graph) -> None:
    """Refuse an ``as_strided`` that reads memory which the values of a graph do not have.

    Raises:
        UnsupportedOperatorError: ``as_strided`` is called on a tensor that has gaps or shares elements, on a
            part of a tensor, or on one with permuted dimensions that a node writes to.
    """
    calls = [n for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    written = {_root(value) for node in calls for value in _written(node)}
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        value = node.args[0].meta["val"]
        order = order_of_memory(value)
        is_turned = order is not None and order != sorted(order)
        if order is None or value.storage_offset() != 0 or (is_turned and _root(node) in written):
            raise UnsupportedOperatorError(
                f"{node.target} at {source_line(node)} reads the memory of a tensor with strides "
                f"{tuple(value.stride())} and offset {value.storage_offset()}, and every value of a graph is "
                f"contiguous. Take as_strided of tensor.contiguous(), or index the tensor"
            )


def refuse_shared_elements(graph: torch.fx.Graph) -> None:
    """Refuse writes into a tensor with several elements in one place in memory, such as a result of `expand`.

    Eager PyTorch raises an error for most of them, and the result of the others is undefined.

    Args:
        graph: a program's nodes, not yet functional.

    Raises:
        UnsupportedOperatorError: there is such a write; the message names its line.
    """
    for node in graph.nodes:
        for target in written_by(node):
            value = target.meta.get("val")
            if isinstance(value, torch.Tensor) and _shares_elements(value):
                raise UnsupportedOperatorError(
                    f"{node.target} at {source_line(node)} writes into a tensor of which several elements "
                    f"are one place in memory, with strides {tuple(value.stride())}, as expand makes. Write "
                    f"into a clone() of it"
                )


def _shares_elements(value: torch.Tensor) -> bool:
    if value.layout is not torch.strided:
        return False
    return any(
        isinstance(stride, int) and stride == 0 and not (isinstance(size, int) and size < 2)
        for size, stride in zip(value.shape, value.stride(), strict=True)
    )


def draw_in_order_of_memory(graph: torch.fx.Graph) -> None:
    """Make draws in place fill the same elements as in eager PyTorch.

    A draw in place fills memory in its order. A functional operator draws for a contiguous tensor instead;
    dropout, which becomes functional here, gets the memory order.

    Args:
        graph: a program's nodes, not yet functional.

    Raises:
        UnsupportedOperatorError: another operator draws for a tensor with permuted dimensions.
    """
    changed = _lie_as_in_eager(graph)
    for node in list(graph.nodes):
        tensor = _drawn_in_place(node)
        if tensor is None or (lies_in_order(tensor) and node not in changed):
            continue
        if node.target is not aten.dropout_.default:
            _refuse_order(node, tensor)
        with graph.inserting_before(node):
            dropped = graph.call_function(aten.dropout.default, node.args)
            dropped.meta = dict(node.meta)
        node.target, node.args = aten.copy_.default, (node.args[0], dropped)


def read_off_shapes(graph: torch.fx.Graph) -> None:
    """Read sizes off the shape of an input, as a graph has no strides of its inputs.

    torch reads each size off the first input that has it, which may have it only as a stride.

    Args:
        graph: a program's nodes; changed in place. A stride that is the size of no input is kept.
    """
    strides = graph.find_nodes(op="call_function", target=aten.sym_stride.int)
    shapes = {
        str(size): (node, axis)
        for node in (reversed(graph.find_nodes(op="placeholder")) if strides else ())
        if isinstance(node.meta.get("val"), torch.Tensor)
        for axis, size in enumerate(node.meta["val"].shape)
    }
    for node in strides:
        found = shapes.get(str(node.meta["val"]))
        if found is not None:
            node.target, node.args = aten.sym_size.int, found


def _lie_as_in_eager(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Give the results of operators the memory layout of PyTorch's kernels, where the trace has another one.

    Random numbers fill elements in the order of memory.

    Returns:
        The nodes that depend on such a result. Their memory layout in the trace is outdated until they are
        traced again.
    """
    changed: set[torch.fx.Node] = set()
    for node in list(graph.nodes):
        if not changed.isdisjoint(node.all_input_nodes):
            changed.add(node)
        if node.target not in _AS_SUGGESTED and node.target not in _CONTIGUOUS:
            continue
        if node.meta["val"].device.type != "cpu":
            continue
        order = torch.contiguous_format
        if node.target in _AS_SUGGESTED:
            given = order_of_memory(node.args[0].meta["val"])
            order = _CHANNELS_LAST.get(tuple(given or ()), order)
        value = node.meta["val"].clone(memory_format=order)
        if order_of_memory(value) == order_of_memory(node.meta["val"]):
            continue
        with graph.inserting_after(node):
            lying = graph.call_function(aten.clone.default, (node,), {"memory_format": order})
        lying.meta = {**node.meta, "val": value}
        for user in list(node.users):
            if user is not lying:
                user.replace_input_with(node, lying)
        changed.add(lying)
    return changed


def _drawn_in_place(node: torch.fx.Node) -> torch.Tensor | None:
    """Return the tensor in whose memory layout a node draws, in place or for a new tensor."""
    if not isinstance(node.target, OpOverload) or not is_random(node):
        return None
    if node.target in _DRAW_FOR_CHANNELS:
        return None
    if not node.target._schema.is_mutable and node.target is not aten.alpha_dropout.default:
        return None
    value = node.args[0].meta.get("val") if isinstance(node.args[0], torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def refuse_other_orders(program: torch.export.ExportedProgram) -> None:
    """Refuse random operators that fill elements in another order than a graph does.

    Raises:
        UnsupportedOperatorError: a random operator's result has permuted dimensions in memory.
    """
    for node in program.graph_module.graph.nodes:
        for tensor in _drawn_for(node):
            if isinstance(tensor, torch.Tensor) and not lies_in_order(tensor):
                _refuse_order(node, tensor)


def _refuse_order(node: torch.fx.Node, tensor: torch.Tensor) -> NoReturn:
    raise UnsupportedOperatorError(
        f"{node.target} at {source_line(node)} draws random numbers for a tensor whose "
        f"dimensions lie in another order in memory, with strides {tuple(tensor.stride())}, and "
        f"a graph would give them to other elements than eager. Draw them for a contiguous "
        f"tensor, as in torch.rand_like(x.contiguous())"
    )


def _drawn_for(node: torch.fx.Node) -> list[object]:
    """Return the tensors in whose memory order ``node`` draws random numbers."""
    if node.target is _PYTHON_OP:
        tensors, key = node.args
        site = site_by_key(str(key))
        # A site of PyTorch's kernel was checked before, as an operator.
        drawing = site.known_result.uses_rng and not site.internal
        return [t.meta.get("val") for t in tensors] if drawing else []  # type: ignore[union-attr]
    if node.op != "call_function" or not is_random(node) or node.target in _DROPOUTS:
        return []
    if is_recurrent(node.target):
        return []  # draws inside, in an order of its own
    value = node.meta.get("val")
    return list(value) if isinstance(value, (tuple, list)) else [value]


def lies_in_order(tensor: torch.Tensor) -> bool:
    """Return True if the elements of a tensor are in memory in the order of its dimensions."""
    strides = [
        size_hint(stride)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size_hint(size) != 1
    ]
    return strides == sorted(strides, reverse=True)


def _written(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the arguments that ``node`` writes to."""
    if not isinstance(node.target, OpOverload):
        # Any argument of a subgraph may be written to.
        return node.all_input_nodes
    found: list[torch.fx.Node] = []
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            values = value if isinstance(value, (list, tuple)) else (value,)
            found += [v for v in values if isinstance(v, torch.fx.Node)]
    return found


def _root(node: torch.fx.Node) -> torch.fx.Node:
    """Return the value whose memory ``node`` may share."""
    while node.op == "call_function" and node.all_input_nodes and _may_alias(node):
        node = node.all_input_nodes[0]
    return node


def _may_alias(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    # A node without a schema is getitem, which returns a part of a value.
    return schema is None or any(value.alias_info is not None for value in schema.returns)
