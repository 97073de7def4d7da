"""Reading of a subcommand's ONNX file."""

from __future__ import annotations

from pathlib import Path

import onnx

from torch2ort.errors import ModelLoadError


def read_model(path: Path) -> onnx.ModelProto:
    """Return the model of a file, without its external data.

    Raises:
        ModelLoadError: the file does not exist, or is not an ONNX model; the message begins with its path.
    """
    try:
        model = onnx.load(path, load_external_data=False)
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path}: there is no such file") from error
    except Exception as error:
        raise ModelLoadError(f"{path}: not a readable ONNX model ({error})") from error
    if not model.HasField("graph"):
        raise ModelLoadError(
            f"{path}: it contains no graph: the file is empty, truncated or not an ONNX model"
        )
    return model
