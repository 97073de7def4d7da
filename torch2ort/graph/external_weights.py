"""Models that are larger than protobuf serializes: 2 GiB, nearly all of it weights."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx
from google.protobuf.message import EncodeError


def content_of(model: onnx.ModelProto) -> bytes | None:
    """``model`` as a file holds it, or ``None`` if its weights have to be in a file of their own."""
    try:
        content: bytes = model.SerializeToString()
    except EncodeError:
        return None
    return content if len(content) < onnx.checker.MAXIMUM_PROTOBUF else None


@contextlib.contextmanager
def loadable(model: onnx.ModelProto) -> Iterator[bytes | str]:
    """What an ``InferenceSession`` takes: the model's bytes, or the path of a file that soon is gone."""
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
