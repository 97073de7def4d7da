"""Refinements: nodes in the graphs that torch2ort runs, metadata in files.

A refinement returns the value of its first input as eager PyTorch computes it: the same index, refused if it
is out of bounds (``CheckedIndex``), or the result of PyTorch's kernel instead of that of operators of ONNX
(``Exact``). In a file, the first input replaces the refinement. The refinement, and the nodes that only
compute its other inputs, are metadata of the nodes that read it, or of the node that computes an output of
the graph.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx
from google.protobuf import json_format
from onnx import helper

from torch2ort.errors import ModelLoadError
from torch2ort.graph.exact_nodes import REFINED_META, changed_node
from torch2ort.graph.graph_traversal import bodies, copied, graphs_in, values_read
from torch2ort.graph.op_allowlist import check_index_text
from torch2ort.kernels.functions import decode_call
from torch2ort.kernels.index_check import CHECKED_INDEX, decode_check

# Returns its second input; in files, the first input replaces it.
EXACT = "torch2ort::Exact"
_KERNEL = "org.pytorch.aten::ATen"


def is_check(node: onnx.NodeProto) -> bool:
    """Return True if a node checks an index."""
    return _operator(node) == CHECKED_INDEX


def is_exact(node: onnx.NodeProto) -> bool:
    """Return True if a node returns its second input."""
    return _operator(node) == EXACT


def is_refinement(node: onnx.NodeProto) -> bool:
    """Return True if the first input of a node replaces it in a file."""
    return is_check(node) or is_exact(node)


def check_of(node: onnx.NodeProto) -> str:
    """Return the attribute ``check`` of a ``CheckedIndex`` node, a text that describes the check."""
    text: bytes = next((a.s for a in node.attribute if a.name == "check"), b"")
    return text.decode()


def unread_nodes(
    nodes: Sequence[onnx.NodeProto],
    outputs: Iterable[str],
    inputs_read: Callable[[onnx.NodeProto], Collection[str] | None],
) -> set[str]:
    """Return the nodes that become unused if some nodes read only a part of their inputs.

    Args:
        nodes: all nodes, in order.
        outputs: the outputs of the graph.
        inputs_read: returns the inputs that a node reads; ``None`` if it reads all.

    Returns:
        The first output of each such node. Nodes that are unused anyway are not among them.
    """
    read, given_up = set(outputs), set[str]()
    unread: set[str] = set()
    for node in reversed(nodes):
        part = inputs_read(node)
        if read.isdisjoint(node.output) and not given_up.isdisjoint(node.output):
            unread.add(node.output[0])
            given_up.update(node.input)
        elif part is not None:
            read.update(part)
            given_up.update(node.input)
        else:
            read.update(node.input, *(values_read(body) for body in bodies(node)))
    return unread


def kernels_in_files(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return the calls of PyTorch's kernels that a file contains: those for which ONNX has no operators."""
    unread = _left_out(graph.node, [value.name for value in graph.output])
    kernels = [node for node in graph.node if _operator(node) == _KERNEL]
    return [node for node in kernels if node.output[0] not in unread]


def drop_exact(graph: onnx.GraphProto) -> None:
    """Remove the kernels of PyTorch that compute the same as operators of ONNX; keep checks of indices."""
    nodes = list(graph.node)
    outputs = [value.name for value in graph.output]
    plain_of = {node.output[0]: node for node in nodes if is_exact(node)}
    unread = unread_nodes(nodes, outputs, lambda n: n.input[:1] if is_exact(n) else None)
    for node in nodes:
        if is_exact(node):
            node.op_type, node.domain = "Identity", ""
            del node.input[1:]
    del graph.node[:]
    graph.node.extend(node for node in nodes if node.output[0] not in unread or node.output[0] in plain_of)


def refinements_as_marks(model: onnx.ModelProto) -> None:
    """Turn the refinements of a model into metadata; :func:`marks_as_refinements` reverses this."""
    graph = model.graph
    nodes = [copied(node) for node in graph.node]
    renamed = _outputs_renamed(nodes, [value.name for value in graph.output])
    refined = {node.output[0]: node for node in nodes if is_refinement(node)}
    unread = _left_out(nodes, [*(value.name for value in graph.output), *renamed])
    left_out = {name: node for node in nodes if node.output[0] in unread for name in node.output}
    kept = [node for node in nodes if node.output[0] not in unread]
    parts = [part for node in kept for part in (node, *_inner_nodes(node))]
    for node in parts:
        marks = [(i, name) for i, name in enumerate(node.input) if name in refined]
        marks += [(~i, renamed[name]) for i, name in enumerate(node.output) if name in renamed]
        if marks:
            record = [[i, [*map(json_format.MessageToDict, _steps(n, left_out, set()))]] for i, n in marks]
            node.metadata_props.add(key=REFINED_META, value=json.dumps(record))
    for node in parts:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                plain = _plain(name, refined)
                names[i] = renamed.get(plain, plain)
    del graph.node[:]
    graph.node.extend(kept)


def marks_as_refinements(model: onnx.ModelProto) -> None:
    """Restore the refinements of a model of :func:`refinements_as_marks`, or the functions of old files.

    Raises:
        ModelLoadError: a mark is damaged, or its node does not read the value that it describes.
    """
    _functions_as_checks(model)
    graph = model.graph
    tops = [(top, _marks(top)) for top in graph.node]
    marked = [mark for _, marks in tops for mark in marks]
    if not marked:
        return
    refined = {s.output[0]: s for mark in marked for s in mark.steps if is_refinement(s)}
    # In a run, the node that computes an output of the file computes the first input of that output's
    # refinement.
    plain_of = {}
    for mark in marked:
        if mark.place < 0:
            outputs, i = mark.node.output, ~mark.place
            if not i < len(outputs) or outputs[i] != mark.result:
                raise changed_node(mark.node)
            plain_of[mark.result] = outputs[i] = _plain(mark.result, refined)
    for mark in marked:
        if mark.place >= 0:
            inputs, i = mark.node.input, mark.place
            given = inputs[i] if i < len(inputs) else ""
            if plain_of.get(given, given) != _plain(mark.result, refined):
                raise changed_node(mark.node)
            inputs[i] = mark.result
    known = {value.name for value in (*graph.input, *graph.initializer)}
    known.update(name for node in graph.node for name in node.output)
    made: dict[str, onnx.NodeProto] = {}
    nodes: list[onnx.NodeProto] = []
    in_order = [(top, [m for m in marks if m.place >= 0]) for top, marks in tops]
    for top, marks in [*in_order, (None, [m for m in marked if m.place < 0])]:
        for mark in marks:
            for step in mark.steps:
                if made.get(step.output[0]) == step:
                    continue
                if not known.isdisjoint(step.output) or not known.issuperset(filter(None, step.input)):
                    raise changed_node(mark.node)
                known.update(step.output)
                made[step.output[0]] = step
                nodes.append(step)
        if top is not None:
            nodes.append(copied(top))
    del graph.node[:]
    graph.node.extend(nodes)


@dataclass(frozen=True)
class _Mark:
    """The refinement of one of a node's tensors, as described by its metadata.

    Attributes:
        node: the node.
        place: the index of an input, or the complement (``~i``) of the index of an output.
        steps: nodes that compute the value in a run, in order; the last one returns it.
    """

    node: onnx.NodeProto
    place: int
    steps: list[onnx.NodeProto]

    @property
    def result(self) -> str:
        name: str = self.steps[-1].output[0]
        return name


def _marks(top: onnx.NodeProto) -> list[_Mark]:
    """Return the marks of a node and of the nodes in its bodies; remove them from the metadata.

    Raises:
        ModelLoadError: a mark is not one that torch2ort wrote.
    """
    found = []
    for node in (top, *_inner_nodes(top)):
        for text in [prop for prop in node.metadata_props if prop.key == REFINED_META]:
            node.metadata_props.remove(text)
            try:
                for place, steps in json.loads(text.value):
                    nodes = [json_format.ParseDict(step, onnx.NodeProto()) for step in steps]
                    if type(place) is not int or not nodes or not all(map(_is_step, nodes)):
                        raise ValueError(text.value)
                    if not is_refinement(nodes[-1]):
                        raise ValueError(nodes[-1].op_type)
                    found.append(_Mark(node, place, nodes))
            except (ValueError, TypeError, json_format.ParseError) as error:
                raise ModelLoadError(
                    f"the metadata '{REFINED_META}' of its node '{node.name}' is damaged ({error})"
                ) from None
    return found


def _is_step(node: onnx.NodeProto) -> bool:
    """Return True if a mark may contain a node: an operator of ONNX, a call of a kernel, a whole refinement.

    Raises:
        ModelLoadError: the node is a check by an operator that no file may call.
    """
    operator = _operator(node)
    if not node.output or not node.output[0]:
        return False
    if operator == CHECKED_INDEX:
        check_index_text(check_of(node))
        check, tensors = decode_check(check_of(node)), len(node.input) - 1
        return max(check.index, check.source or 0) < tensors <= decode_call(check.call).tensors
    if operator == EXACT:
        return len(node.input) == 2
    # Kernels are checked together with the other calls of a file (graph_traversal.load_sites).
    return operator == _KERNEL or not node.domain


def _outputs_renamed(nodes: list[onnx.NodeProto], outputs: Sequence[str]) -> dict[str, str]:
    """Return the new names of values that become outputs of the file; other refined outputs become copies.

    In a run such a value is the first input of a refinement; in the file it has the name of the refined
    output.
    """
    refined = {node.output[0]: node for node in nodes if is_refinement(node)}
    given = {name for node in nodes if not is_refinement(node) for name in node.output}
    renamed: dict[str, str] = {}
    for name in [name for name in outputs if name in refined]:
        plain = _plain(name, refined)
        if plain in given and plain not in renamed and plain not in outputs:
            renamed[plain] = name
        else:
            result = f"{name}/refined"
            for node in nodes:
                for names in (node.input, node.output):
                    names[:] = [result if n == name else n for n in names]
            nodes.append(helper.make_node("Identity", [result], [name], name=result))
    return renamed


def _left_out(nodes: Sequence[onnx.NodeProto], outputs: Iterable[str]) -> set[str]:
    """Return the first outputs of the nodes that files leave out."""
    refined = {node.output[0] for node in nodes if is_refinement(node)}
    return refined | unread_nodes(nodes, outputs, lambda n: n.input[:1] if is_refinement(n) else None)


def _plain(name: str, refined: Mapping[str, onnx.NodeProto]) -> str:
    """Return the value that replaces a value in a file; in a cycle of refinements, one of its values."""
    seen: set[str] = set()
    while name in refined and name not in seen:
        seen.add(name)
        name = refined[name].input[0]
    return name


def _steps(name: str, left_out: Mapping[str, onnx.NodeProto], seen: set[str]) -> list[onnx.NodeProto]:
    """Return the nodes, left out of the file, that compute a value, in order."""
    node = left_out.get(name)
    if node is None or node.output[0] in seen:
        return []
    seen.add(node.output[0])
    return [*(step for value in node.input for step in _steps(value, left_out, seen)), node]


def _functions_as_checks(model: onnx.ModelProto) -> None:
    """Turn the local functions in files of earlier versions into checks."""
    domain, _, name = CHECKED_INDEX.partition("::")
    texts = {f.name: f for f in model.functions if f.domain == domain and f.name.startswith(f"{name}_")}
    for node in model.graph.node:
        if node.domain == domain and node.op_type in texts:
            text = texts[node.op_type].doc_string
            check_index_text(text)
            node.op_type = name
            node.attribute.append(helper.make_attribute("check", text))
    for function in texts.values():
        model.functions.remove(function)


def _operator(node: onnx.NodeProto) -> str:
    return f"{node.domain}::{node.op_type}"


def _inner_nodes(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return the nodes in the bodies of a node."""
    return [inner for body in bodies(node) for graph in graphs_in(body) for inner in graph.node]
