"""Order of calls with effects beyond their results, and their execution if they are unused.

ONNX has no order except that of data, and skips unused nodes. Both order and use are expressed by data
without content: a tensor is reshaped to its own shape, to which another tensor contributes no number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_ir as ir

from torch2ort.errors import ExportError
from torch2ort.graph.refinements import EXACT
from torch2ort.kernels.index_check import CHECKED_INDEX
from torch2ort.pythonop import SITE_META, Site, site_by_key

_DOMAIN = "torch2ort"
_NAME = "MustCompute"
# Its input is computed even if the result is unused; the node exists until a graph is finished.
MUST_COMPUTE = f"{_DOMAIN}::{_NAME}"


def must_run(node: ir.Node) -> bool:
    """Return True if a node in translation calls a user's Function, draws random numbers or is a check."""
    if _must_compute(node):
        return True
    key = node.metadata_props.get(SITE_META)
    return key is not None and _does_more(site_by_key(key))


def has_backward(node: ir.Node) -> bool:
    """Return True if a node is a call, of a Function or of PyTorch's kernel, with a backward of its own."""
    key = node.metadata_props.get(SITE_META)
    if key is None:
        return False
    site = site_by_key(key)
    return site.training and any(site.needs_input_grad)


def keep_order(graph: ir.Graph, calls: Collection[str]) -> None:
    """Keep ONNX Runtime from reordering calls that draw random numbers or write to Python objects.

    The numbers come from PyTorch's single generator, so another order leads to other numbers than eager's.

    Args:
        graph: nodes in the order of the program; changed in place.
        calls: names of the nodes to keep in order.
    """
    before: ir.Node | None = None
    for node in list(graph):
        if node.name not in calls:
            continue
        if before is not None and node.inputs and not _comes_after(node, before):
            first = node.inputs[0]
            assert first is not None
            node.replace_input_with(0, _after(graph, node, first, before.outputs[1]))
        before = node if len(node.outputs) > 1 else before


def order_after(graph: ir.Graph, pairs: Mapping[str, str]) -> None:
    """Keep ONNX Runtime from running a node before another one, even if it reads none of its results.

    Args:
        graph: nodes in topological order; changed in place.
        pairs: name of a node -> name of the call that comes before it.
    """
    nodes = {node.name: node for node in graph}
    for name, before in pairs.items():
        node, first = nodes[name], nodes[name].inputs[0]
        if not _comes_after(node, nodes[before]):
            assert first is not None
            node.replace_input_with(0, _after(graph, node, first, nodes[before].outputs[1]))


def _comes_after(node: ir.Node, other: ir.Node) -> bool:
    """Return True if a node depends on another one by data."""
    seen: set[ir.Node] = set()
    stack = [node]
    while stack:
        for value in stack.pop().inputs:
            producer = None if value is None else value.producer()
            if producer is other:
                return True
            if producer is not None and producer not in seen:
                seen.add(producer)
                stack.append(producer)
    return False


def keep_unused_calls(graph: ir.Graph, sites: Mapping[str, Site]) -> None:
    """Make unused calls and checks run, as eager runs them, by making the first output depend on them.

    Args:
        graph: changed in place.
        sites: the site of each PythonOp node, by node name.

    Raises:
        ExportError: such a call returns no tensor that an output could depend on.
    """
    for node in list(graph):
        if _must_compute(node):
            value = node.inputs[0]
            assert value is not None
            graph.remove(node, safe=True)
            if graph.outputs:
                # The dependency exists in a session alone: a file does not contain the check.
                _wait(graph, value, node.name or _NAME, in_files=False)
    read: set[ir.Node] = set()
    _add_read(read, graph.outputs)
    # A call that an output depends on reads calls before it.
    for node in reversed(list(graph)):
        site = sites.get(node.name or "")
        if site is None or node in read or not _does_more(site):
            continue
        if len(node.outputs) < 2 or not graph.outputs:
            raise ExportError(
                f"{site.func_name}: the call returns no tensor, so nothing in a graph depends on it and "
                f"it would not run. Have forward return a tensor, such as its argument's clone(), or call it "
                f"outside of the model"
            )
        _wait(graph, node.outputs[1], node.name or "")
        _add_read(read, [node.outputs[1]])


def _add_read(read: set[ir.Node], values: Iterable[ir.Value | None]) -> None:
    """Add the nodes whose numbers are read for ``values``."""
    stack = [value.producer() for value in values if value is not None]
    while stack:
        node = stack.pop()
        if node is None or node in read:
            continue
        read.add(node)
        stack.extend(value.producer() for value in _read_by(node) if value is not None)


def _read_by(node: ir.Node) -> Sequence[ir.Value | None]:
    """Return the inputs whose numbers a node reads; ONNX Runtime may know a size without them."""
    if node.op_type in ("Shape", "Size"):
        return ()
    return node.inputs[:1] if f"{node.domain}::{node.op_type}".startswith(CHECKED_INDEX) else node.inputs


def _does_more(site: Site) -> bool:
    """Return True if ``site`` calls a user's Function or draws random numbers."""
    return not site.internal or site.known_result.uses_rng


def _must_compute(node: ir.Node) -> bool:
    return node.domain == _DOMAIN and node.op_type == _NAME


def _wait(graph: ir.Graph, token: ir.Value, what: str, *, in_files: bool = True) -> None:
    """Make the first output depend on ``token``."""
    result = graph.outputs[0]
    waiting = _after(graph, graph[-1], result, token, behind=True)
    if not in_files:
        chosen = ir.node(EXACT.partition("::")[2], [result, waiting], domain=_DOMAIN)
        graph.append(chosen)
        waiting = chosen.outputs[0]
    waiting.shape, waiting.type, waiting.name = result.shape, result.type, result.name
    result.name = f"{result.name}.before.{what}"
    graph.outputs[0] = waiting


def _after(
    graph: ir.Graph, place: ir.Node, value: ir.Value, token: ir.Value, *, behind: bool = False
) -> ir.Value:
    """Return a copy of ``value`` that depends on ``token``, by nodes in front of ``place`` or behind it."""
    constants = [ir.node("Constant", [], {"value": ir.tensor([n], dtype=ir.DataType.INT64)}) for n in (-1, 0)]
    flat_shape, zero = (node.outputs[0] for node in constants)
    flat = ir.node("Reshape", [token, flat_shape])
    nothing = ir.node("Slice", [flat.outputs[0], zero, zero])
    sizes = ir.node("Cast", [nothing.outputs[0]], {"to": ir.DataType.INT64})
    own = ir.node("Shape", [value])
    shape = ir.node("Concat", [own.outputs[0], sizes.outputs[0]], {"axis": 0})
    same = ir.node("Reshape", [value, shape.outputs[0]], {"allowzero": 1})
    same.outputs[0].shape, same.outputs[0].type = value.shape, value.type
    (graph.insert_after if behind else graph.insert_before)(
        place, [*constants, flat, nothing, sizes, own, shape, same]
    )
    return same.outputs[0]
