"""The JSON form of a schema: a line per node, in front of its children and indented below its parent."""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import optree

from torch2ort.errors import SchemaError
from torch2ort.io_schema._containers import ADAPTERS, NAMESPACE
from torch2ort.io_schema._json_values import Decoder, decode_dtype, encode_object, encode_value
from torch2ort.io_schema._leaves import CONSTANT_TYPES
from torch2ort.io_schema._paths import tensor_names, written
from torch2ort.io_schema._structure import MAPPING_KINDS, Node, nodes_of, paths_of, spec_of, tensor_node

_FORMAT: Final = "torch2ort.io_schema"
_VERSION: Final = 1
_DEEPEST_INDENT: Final = 24

_BUILTIN: Final[Mapping[str, type]] = {
    "tuple": tuple,
    "list": list,
    "dict": dict,
    "ordereddict": OrderedDict,
    "defaultdict": defaultdict,
    "deque": deque,
}

_CLASS_TESTS: Final[Mapping[str, tuple[str, Callable[[type], bool]]]] = {
    "namedtuple": ("the namedtuple", optree.is_namedtuple_class),
    "structsequence": ("the struct sequence", optree.is_structseq_class),
    "cache": ("the cache", ADAPTERS["cache"].accepts),
    "model_output": ("the ModelOutput", ADAPTERS["model_output"].accepts),
    "dataclass": ("the dataclass", ADAPTERS["dataclass"].accepts),
    "mapping": ("the mapping", ADAPTERS["mapping"].accepts),
    "sequence": ("the sequence", ADAPTERS["sequence"].accepts),
    "custom": (
        "a class registered with optree,",
        lambda cls: optree.register_pytree_node.get(cls, namespace=NAMESPACE) is not None,
    ),
}
"""Requirement on the class of each kind of container, in words and as a test."""


def encode(nodes: Sequence[Node]) -> str:
    """Return the JSON form of a structure.

    Raises:
        SchemaError: A key, a factory or metadata has no JSON form. The message contains its path.
    """
    names = iter(tensor_names(nodes))
    lines = []
    for node, path in zip(nodes, paths_of(nodes), strict=True):
        try:
            form = _encode_leaf(node, names) if node.is_leaf else _encode_container(node)
        except SchemaError as error:
            raise SchemaError(f"{written(path, 'data')}: {error}.") from None
        lines.append("  " * min(len(path) + 1, _DEEPEST_INDENT) + json.dumps(form))
    body = ",\n".join(lines)
    return f'{{"format": "{_FORMAT}", "version": {_VERSION}, "nodes": [\n{body}\n]}}\n'


def _encode_leaf(node: Node, names: Iterator[str]) -> dict[str, Any]:
    if node.kind == "constant":
        return {"constant": encode_value(node.detail)}
    dtype, rank = node.detail
    return {"tensor": encode_value(dtype)["dtype"], "rank": rank, "name": next(names)}


def _encode_container(node: Node) -> dict[str, Any]:
    form: dict[str, Any] = {"container": node.kind}
    if node.kind not in _BUILTIN:
        form["class"] = encode_object(node.cls)
    if node.kind in MAPPING_KINDS or node.kind in ("dataclass", "cache"):
        form["keys"] = [encode_value(key) for key in node.keys]
    else:
        form["size"] = node.arity
    if node.kind == "namedtuple":
        form["fields"] = list(optree.namedtuple_fields(node.cls))
    if node.detail is not None:
        has_factory = node.kind in ("defaultdict", "mapping")
        form["factory" if has_factory else "detail"] = (encode_object if has_factory else encode_value)(
            node.detail
        )
    return form


def decode(text: str, classes: Iterable[Any]) -> tuple[tuple[Node, ...], optree.PyTreeSpec]:
    """Return the structure whose JSON form is `text`, as nodes and in optree's terms.

    Args:
        text: Text that :func:`encode` returned.
        classes: Classes and factories that the text may refer to, besides those already imported.

    Raises:
        SchemaError: The text is something else, or refers to a class that is not known.
    """
    try:
        document = json.loads(text)
        if document["format"] != _FORMAT:
            raise ValueError(f"its format is {document['format']!r}")
        _check_version(document["version"])
        decoder = Decoder(classes)
        written_nodes = [_decode_node(form, decoder) for form in document["nodes"]]
        spec = spec_of(written_nodes)
        leaves = [node for node in written_nodes if node.is_leaf]
        nodes = nodes_of(spec, leaves) if spec.num_leaves == len(leaves) else ()
        if [node.token for node in nodes] != [node.token for node in written_nodes]:
            raise ValueError(
                "a class in it takes its instances apart in another way than when it was written"
            )
        if list(tensor_names(nodes)) != [form["name"] for form in document["nodes"] if "tensor" in form]:
            raise ValueError("the names in it are not those of its tensors")
    except SchemaError as error:
        raise SchemaError(f"{error}.") from None
    except Exception as error:
        raise SchemaError(
            f"this is not the JSON form of a schema ({type(error).__name__}: {error}). Write one with "
            "Schema.to_json()."
        ) from error
    return nodes, spec


def _check_version(version: Any) -> None:
    if version != _VERSION:
        raise SchemaError(
            f"the schema is in version {version!r} of its JSON form, and this torch2ort reads version "
            f"{_VERSION}. Write it again with this torch2ort"
        )


def _decode_node(form: Any, decoder: Decoder) -> Node:
    if "tensor" in form:
        return tensor_node(decode_dtype(form["tensor"]), _count(form["rank"]))
    if "constant" in form:
        value = decoder.decode_value(form["constant"])
        if type(value) not in CONSTANT_TYPES:
            raise ValueError(f"a constant of type {type(value).__name__}")
        return Node("constant", type(value), detail=value)
    kind = form["container"]
    cls = _BUILTIN.get(kind) or decoder.find_class(form["class"], *_CLASS_TESTS[kind])
    _check_fields(kind, cls, form)
    keys = tuple(decoder.decode_value(key) for key in form.get("keys", ()))
    arity = len(keys) if "keys" in form else _count(form["size"])
    detail = (
        decoder.find_factory(form["factory"])
        if "factory" in form
        else decoder.decode_value(form.get("detail"))
    )
    return Node(kind, cls, arity, keys, detail)


def _check_fields(kind: str, cls: Any, form: Any) -> None:
    if kind == "namedtuple":
        needed, present = form["fields"], list(optree.namedtuple_fields(cls))
        fits = needed == present
    elif kind == "dataclass":
        needed, present = form["keys"], [field.name for field in dataclasses.fields(cls)]
        fits = set(needed) <= set(present)
    else:
        return
    if not fits:
        raise SchemaError(
            f"the schema needs the {kind} {form['class']} with fields {needed}, but here it has {present}"
        )


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
