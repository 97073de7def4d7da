"""Refinements: nodes in the graphs that torch2ort runs, metadata in files.

A refinement gives its first input as eager PyTorch has it: the same index, refused if it lies outside
(``CheckedIndex``), or what PyTorch's kernel computes instead of operators of ONNX (``Exact``). A file holds
the first input in its place. The refinement, and the nodes that compute its other inputs alone, are metadata
of the nodes that read it, or of the one that gives an output of the graph.
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

# The second input's result; the first one's in files.
EXACT = "torch2ort::Exact"
_KERNEL = "org.pytorch.aten::ATen"


def is_check(node: onnx.NodeProto) -> bool:
    """Whether a node checks an index."""
    return _operator(node) == CHECKED_INDEX


def is_exact(node: onnx.NodeProto) -> bool:
    """Whether a node gives its second input."""
    return _operator(node) == EXACT


def is_refinement(node: onnx.NodeProto) -> bool:
    """Whether a file holds the first input of a node in its place."""
    return is_check(node) or is_exact(node)


def check_of(node: onnx.NodeProto) -> str:
    """The text that describes the check of a node that checks an index."""
    text: bytes = next((a.s for a in node.attribute if a.name == "check"), b"")
    return text.decode()


def unread_nodes(
    nodes: Sequence[onnx.NodeProto],
    outputs: Iterable[str],
    inputs_read: Callable[[onnx.NodeProto], Collection[str] | None],
) -> set[str]:
    """The first outputs of nodes that nobody reads if some nodes read a part of their inputs alone.

    Args:
        nodes: in order.
        outputs: of the graph.
        inputs_read: what such a node reads; ``None`` for others, which read all.
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
    """The calls of PyTorch's kernels that a file holds: where ONNX has no operators."""
    unread = _left_out(graph.node, [value.name for value in graph.output])
    kernels = [node for node in graph.node if _operator(node) == _KERNEL]
    return [node for node in kernels if node.output[0] not in unread]


def drop_exact(graph: onnx.GraphProto) -> None:
    """Take out what PyTorch's kernels compute beside operators of ONNX; checks of indices stay."""
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
    """Take refinements out of a model, which :func:`marks_as_refinements` puts back."""
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
    """Put refinements back into a model of :func:`refinements_as_marks`; old files hold functions of them.

    Raises:
        ModelLoadError: a mark is damaged, or its node reads something else.
    """
    _functions_as_checks(model)
    graph = model.graph
    tops = [(top, _marks(top)) for top in graph.node]
    marked = [mark for _, marks in tops for mark in marks]
    if not marked:
        return
    refined = {s.output[0]: s for mark in marked for s in mark.steps if is_refinement(s)}
    # In a run, what gives an output of the file gives the first input of its refinement.
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
    """What a node's metadata says of one of its tensors.

    Attributes:
        node: the node.
        place: the number of an input; of an output its complement.
        steps: nodes that compute the value in a run, in order; the last one gives it.
    """

    node: onnx.NodeProto
    place: int
    steps: list[onnx.NodeProto]

    @property
    def result(self) -> str:
        name: str = self.steps[-1].output[0]
        return name


def _marks(top: onnx.NodeProto) -> list[_Mark]:
    """What the metadata of a node and of those in its bodies say; these are taken off.

    Raises:
        ModelLoadError: a mark is none of torch2ort's.
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
    """Whether a mark may hold a node: operators of ONNX, calls of kernels, and whole refinements.

    Raises:
        ModelLoadError: a check is of an operator that no file may call.
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
    # Kernels are looked at where the calls of a file are (graph_traversal.load_sites).
    return operator == _KERNEL or not node.domain


def _outputs_renamed(nodes: list[onnx.NodeProto], outputs: Sequence[str]) -> dict[str, str]:
    """Names that nodes give to outputs of a file, by what they give in a run; other outputs become copies."""
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
    """The first outputs of the nodes that files leave out."""
    refined = {node.output[0] for node in nodes if is_refinement(node)}
    return refined | unread_nodes(nodes, outputs, lambda n: n.input[:1] if is_refinement(n) else None)


def _plain(name: str, refined: Mapping[str, onnx.NodeProto]) -> str:
    """What a file holds in the place of a value; of values in a circle one of these."""
    seen: set[str] = set()
    while name in refined and name not in seen:
        seen.add(name)
        name = refined[name].input[0]
    return name


def _steps(name: str, left_out: Mapping[str, onnx.NodeProto], seen: set[str]) -> list[onnx.NodeProto]:
    """The nodes that a file leaves out and a value is computed by, in order."""
    node = left_out.get(name)
    if node is None or node.output[0] in seen:
        return []
    seen.add(node.output[0])
    return [*(step for value in node.input for step in _steps(value, left_out, seen)), node]


def _functions_as_checks(model: onnx.ModelProto) -> None:
    """Turn the local functions that files of earlier versions hold into checks."""
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
    """Those in the bodies of a node."""
    return [inner for body in bodies(node) for graph in graphs_in(body) for inner in graph.node]
