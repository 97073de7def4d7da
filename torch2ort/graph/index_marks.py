"""Checks of indices: nodes in the graphs that torch2ort runs, marks of their readers in files.

A file holds what ONNX says of an index. What eager refuses beyond that is metadata of the nodes that read it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import onnx
from onnx import helper

from torch2ort.errors import ModelLoadError
from torch2ort.graph.exact_nodes import INDEX_META
from torch2ort.graph.graph_traversal import bodies, graphs_in
from torch2ort.graph.op_allowlist import check_index_text
from torch2ort.kernels.functions import decode_call
from torch2ort.kernels.index_check import CHECKED_INDEX, decode_check

_DOMAIN, _, _NAME = CHECKED_INDEX.partition("::")


def is_check(node: onnx.NodeProto) -> bool:
    """Whether a node checks an index."""
    return node.op_type == _NAME and node.domain == _DOMAIN


def check_of(node: onnx.NodeProto) -> str:
    """The text that describes the check of such a node."""
    text: bytes = next(a.s for a in node.attribute if a.name == "check")
    return text.decode()


def checks_as_marks(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model``, or a copy of it without checks, which :func:`marks_as_checks` turns back."""
    checks = {node.output[0]: node for node in model.graph.node if is_check(node)}
    if not checks:
        return model
    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    returned = {value.name for value in graph.output}
    del graph.node[:]
    for node in model.graph.node:
        if not is_check(node):
            graph.node.append(node)
        elif node.output[0] in returned:
            # A name of the graph's output stays.
            graph.node.append(helper.make_node("Identity", node.output[:], node.output, name=node.name))
    for node in _all_nodes(graph):
        found = [(i, name) for i, name in enumerate(node.input) if name in checks]
        for i, name in found:
            node.input[i] = _unchecked(name, checks)
        if found:
            records = [[i, _steps(name, checks)] for i, name in found]
            node.metadata_props.add(key=INDEX_META, value=json.dumps(records))
    return made


def marks_as_checks(model: onnx.ModelProto) -> None:
    """Put the checks back into a model that :func:`checks_as_marks` gave; old files hold functions of them.

    Raises:
        ModelLoadError: a mark is damaged, or its node reads something else.
    """
    _functions_as_checks(model)
    graph = model.graph
    known = {value.name for value in (*graph.input, *graph.initializer)}
    known.update(name for node in graph.node for name in node.output)
    nodes: list[onnx.NodeProto] = []
    made: dict[str, list[Any]] = {}
    for node in graph.node:
        for reader in (node, *(inner for body in bodies(node) for inner in _all_nodes(body))):
            for place, steps in _records(reader):
                for output, text, inputs in steps:
                    if output in made and made[output] == [text, inputs]:
                        continue
                    if output in known or not known.issuperset(inputs):
                        raise _changed(reader)
                    made[output] = [text, inputs]
                    known.add(output)
                    nodes.append(_check_node(output, text, inputs))
                checked = steps[-1][0]
                if not place < len(reader.input) or reader.input[place] != _source(checked, made):
                    raise _changed(reader)
                reader.input[place] = checked
        nodes.append(node)
    if made:
        del graph.node[:]
        graph.node.extend(nodes)


def _unchecked(name: str, checks: dict[str, onnx.NodeProto]) -> str:
    while name in checks:
        name = checks[name].input[0]
    return name


def _steps(name: str, checks: dict[str, onnx.NodeProto]) -> list[list[Any]]:
    """A check, behind those that it reads."""
    inputs = list(checks[name].input)
    before = [step for value in dict.fromkeys(inputs) if value in checks for step in _steps(value, checks)]
    return [*before, [name, check_of(checks[name]), inputs]]


def _source(name: str, made: dict[str, list[Any]]) -> str:
    while name in made:
        name = made[name][1][0]
    return name


def _records(node: onnx.NodeProto) -> list[tuple[int, list[list[Any]]]]:
    """Numbers of a node's inputs, and the checks of each: results, texts and inputs. Its marks are taken off.

    Raises:
        ModelLoadError: a mark is none of torch2ort's.
    """
    marks = [p for p in node.metadata_props if p.key == INDEX_META]
    found = []
    for mark in marks:
        node.metadata_props.remove(mark)
        try:
            for place, steps in json.loads(mark.value):
                if type(place) is not int or place < 0 or not steps:
                    raise ValueError(mark.value)
                for output, text, inputs in steps:
                    check_index_text(text)
                    check, tensors = decode_check(text), len(inputs) - 1
                    fits = max(check.index, check.source or 0) < tensors <= decode_call(check.call).tensors
                    if not fits or not all(type(name) is str and name for name in (output, *inputs)):
                        raise ValueError(output)
                found.append((place, steps))
        except (ValueError, TypeError) as error:
            raise ModelLoadError(
                f"the metadata '{INDEX_META}' of its node '{node.name}' is damaged ({error})"
            ) from None
    return found


def _check_node(output: str, text: str, inputs: list[str]) -> onnx.NodeProto:
    return helper.make_node(_NAME, inputs, [output], name=f"node_{output}", domain=_DOMAIN, check=text)


def _changed(node: onnx.NodeProto) -> ModelLoadError:
    return ModelLoadError(
        f"its node '{node.name}' does not read the index that its metadata describes: it was changed by "
        f"another tool. Export the model again, or open it in a plain onnxruntime.InferenceSession, which "
        f"computes it as ONNX Runtime does"
    )


def _functions_as_checks(model: onnx.ModelProto) -> None:
    """Turn the local functions that files of earlier versions hold into checks."""
    texts = {f.name: f for f in model.functions if f.domain == _DOMAIN and f.name.startswith(f"{_NAME}_")}
    for node in model.graph.node:
        if node.domain == _DOMAIN and node.op_type in texts:
            text = texts[node.op_type].doc_string
            check_index_text(text)
            node.op_type = _NAME
            node.attribute.append(helper.make_attribute("check", text))
    for function in texts.values():
        model.functions.remove(function)


def _all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    return (node for part in graphs_in(graph) for node in part.node)
