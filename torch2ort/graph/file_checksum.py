"""A checksum in front of a saved model: damage is an error, not another model.

The seal is one ``metadata_props`` entry at the very start of the file. Fields of a protobuf message may come
in any order, so that every reader of ONNX takes the file; a tool that writes the model anew puts the fields
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
# Of ir_version, the first field of a model in canonical order.
_FIRST_TAG = b"\x08"
_CHUNK = 1 << 22


def _entry(digest: str) -> bytes:
    entry: bytes = onnx.ModelProto(
        metadata_props=[onnx.StringStringEntryProto(key=_KEY, value=digest)]
    ).SerializeToString()
    return entry


_LENGTH = len(_entry("0" * 64))


def sealed(content: bytes) -> Iterable[bytes]:
    """The parts of a file that holds ``content``, a serialized model, behind a seal."""
    return _entry(hashlib.sha256(content).hexdigest()), content


def seal_data(model: onnx.ModelProto, data: Path) -> None:
    """Note the checksum of the model's external data in the model.

    Args:
        model: changed in place.
        data: the file that its weights are in.
    """
    model.metadata_props.add(key=_DATA_KEY, value=_digest(data))


def read(path: Path) -> onnx.ModelProto:
    """A model with its external data, compared with what was saved.

    Raises:
        ModelLoadError: file or data are not what was saved.
        Exception: whatever onnx raises of a file that is no model, or refers to data outside of its folder.
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
    # This refuses locations outside of the folder: nothing of theirs is read before.
    onnx.external_data_helper.load_external_data_for_model(model, str(path.parent))
    for location in locations if expected else ():
        if _digest(path.parent / location) not in expected:
            raise ModelLoadError(
                f"its data in {location} is damaged: the checksum is not that of what was saved"
            )
    return model


def _check(content: bytes) -> None:
    if content[:1] == _FIRST_TAG:
        return
    if content[:_LENGTH] != _entry(hashlib.sha256(memoryview(content)[_LENGTH:]).hexdigest()):
        raise ModelLoadError("it is damaged: its checksum is not that of what was saved")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
