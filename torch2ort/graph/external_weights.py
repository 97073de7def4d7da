"""Models above 2 GiB, which protobuf cannot serialize; nearly all of that is weights."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx
from google.protobuf.message import EncodeError


def content_of(model: onnx.ModelProto) -> bytes | None:
    """Return ``model`` serialized, or ``None`` if its weights must be stored in a separate file."""
    try:
        content: bytes = model.SerializeToString()
    except EncodeError:
        return None
    return content if len(content) < onnx.checker.MAXIMUM_PROTOBUF else None


@contextlib.contextmanager
def loadable(model: onnx.ModelProto) -> Iterator[bytes | str]:
    """Yield the argument of an ``InferenceSession``: the model's bytes, or the path of a temporary file."""
    content = content_of(model)
    if content is not None:
        yield content
        return
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    with tempfile.TemporaryDirectory(prefix="torch2ort-") as folder:
        path = str(Path(folder, "model.onnx"))
        onnx.save_model(copy, path, save_as_external_data=True, location="weights")
        del copy
        yield path
