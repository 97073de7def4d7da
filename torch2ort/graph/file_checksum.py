"""A checksum in front of a saved model: a damaged file raises an error, and is not read as another model.

The seal is one ``metadata_props`` entry at the very start of the file. Fields of a protobuf message may come
in any order, so every reader of ONNX accepts the file. A tool that rewrites the model puts the fields
in their canonical order, ``ir_version`` first, which drops the seal. Such a file is not checked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import onnx
import onnx.external_data_helper

from torch2ort.errors import ModelLoadError

_KEY = "torch2ort.sha256"
_DATA_KEY = "torch2ort.data_sha256"
# The tag of ir_version, the first field of a model in canonical order.
_FIRST_TAG = b"\x08"
_CHUNK = 1 << 22


def _entry(digest: str) -> bytes:
    entry: bytes = onnx.ModelProto(
        metadata_props=[onnx.StringStringEntryProto(key=_KEY, value=digest)]
    ).SerializeToString()
    return entry


_LENGTH = len(_entry("0" * 64))


def sealed(content: bytes) -> Iterable[bytes]:
    """Return the parts of a file: a seal, then ``content``, a serialized model."""
    return _entry(hashlib.sha256(content).hexdigest()), content


def seal_data(model: onnx.ModelProto, data: Path) -> None:
    """Add the checksum of the model's external data to its metadata.

    Args:
        model: changed in place.
        data: the file that contains its weights.
    """
    model.metadata_props.add(key=_DATA_KEY, value=_digest(data))


def read(path: Path) -> onnx.ModelProto:
    """Read a model with its external data, and compare their checksums with those that were saved.

    Raises:
        ModelLoadError: the file or its data differ from what was saved.
        Exception: onnx raises it if the file is not a model, or refers to data outside of its folder.
    """
    content = path.read_bytes()
    _check(content)
    model = onnx.load_model_from_string(content)
    expected = {entry.value for entry in model.metadata_props if entry.key == _DATA_KEY}
    locations = {
        entry.value
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    # onnx refuses locations outside of the folder; no file outside is read before this check.
    onnx.external_data_helper.load_external_data_for_model(model, str(path.parent))
    for location in locations if expected else ():
        if _digest(path.parent / location) not in expected:
            raise ModelLoadError(
                f"its data in {location} is damaged: the checksum differs from the one that was saved. "
                f"Save the model again"
            )
    return model


def _check(content: bytes) -> None:
    if content[:1] == _FIRST_TAG:
        return
    if content[:_LENGTH] != _entry(hashlib.sha256(memoryview(content)[_LENGTH:]).hexdigest()):
        raise ModelLoadError(
            "it is damaged, or not an ONNX model: its checksum differs from the one that was saved. "
            "Save the model again"
        )


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
