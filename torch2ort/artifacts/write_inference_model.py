"""Writing of an ONNX file with values in the place of some of its inputs, on the level of protobuf's bytes.

A training step runs without a package that reads ONNX files, and protobuf's format is simple: a message is
a sequence of fields, each with a number, a kind and a content.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from torch2ort.artifacts import atomic_write
from torch2ort.errors import ExportError, ModelLoadError

# Field numbers of onnx.proto.
_MODEL_GRAPH, _GRAPH_INITIALIZER, _GRAPH_INPUT, _VALUE_NAME = 7, 5, 11, 1
_DIMS, _DATA_TYPE, _NAME, _RAW_DATA = 1, 2, 8, 9
_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}
_MOST_BYTES = (1 << 31) - 1

_ELEMENT_TYPES = {
    "float32": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7, "bool": 9,
    "float16": 10, "float64": 11, "uint32": 12, "uint64": 13,
}  # fmt: skip


def write_inference_model(
    path: str | os.PathLike[str], content: bytes, values: Mapping[str, np.ndarray[Any, Any]]
) -> None:
    """Write an ONNX file in which inputs are replaced by initializers.

    Args:
        path: the file, written atomically.
        content: of the file with these inputs.
        values: input -> its value.

    Raises:
        ExportError: the file would be larger than protobuf allows.
        ModelLoadError: ``content`` is not an ONNX file.
        OSError: the file cannot be written.
    """
    if len(content) + sum(value.nbytes for value in values.values()) > _MOST_BYTES:
        raise ExportError(f"{path}: the model is larger than 2 GiB, the limit of an ONNX file")
    model = bytearray()
    for number, kind, field, body in _fields(content):
        if number == _MODEL_GRAPH and kind == _BYTES:
            graph = _graph(body, values)
            model += _tag(number, _BYTES) + _varint(len(graph)) + graph
        else:
            model += field
    atomic_write.write(path, bytes(model))


def _graph(content: bytes, values: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    graph = bytearray()
    for number, kind, field, body in _fields(content):
        if number == _GRAPH_INPUT and kind == _BYTES and _name(body) in values:
            continue
        graph += field
    for name, value in values.items():
        tensor = _tensor(name, value)
        graph += _tag(_GRAPH_INITIALIZER, _BYTES) + _varint(len(tensor)) + tensor
    return bytes(graph)


def _tensor(name: str, value: np.ndarray[Any, Any]) -> bytes:
    made = bytearray()
    for size in value.shape:
        made += _tag(_DIMS, _VARINT) + _varint(size)
    made += _tag(_DATA_TYPE, _VARINT) + _varint(_ELEMENT_TYPES[value.dtype.name])
    for number, body in ((_NAME, name.encode()), (_RAW_DATA, _little(value))):
        made += _tag(number, _BYTES) + _varint(len(body)) + body
    return bytes(made)


def _little(value: np.ndarray[Any, Any]) -> bytes:
    return value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()


def _name(value_info: bytes) -> str:
    return next(
        (
            body.decode()
            for number, kind, _, body in _fields(value_info)
            if (number, kind) == (_VALUE_NAME, _BYTES)
        ),
        "",
    )


def _fields(content: bytes) -> Iterator[tuple[int, int, bytes, bytes]]:
    """Yield the number, kind, all bytes and the content of each field of a message.

    Raises:
        ModelLoadError: the content is not a message.
    """
    view, at = memoryview(content), 0
    try:
        while at < len(view):
            begin = at
            tag, at = _read_varint(view, at)
            kind = tag & 7
            if kind == _VARINT:
                _, end = _read_varint(view, at)
            elif kind == _BYTES:
                size, at = _read_varint(view, at)
                end = at + size
            else:
                end = at + _FIXED[kind]
            if end > len(view):
                raise IndexError("a field ends after the end of the file")
            yield tag >> 3, kind, bytes(view[begin:end]), bytes(view[at:end])
            at = end
    except (IndexError, KeyError) as error:
        raise ModelLoadError(f"the content is not an ONNX file ({error})") from error


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


def _tag(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)
