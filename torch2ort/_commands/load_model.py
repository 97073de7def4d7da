"""Reads the ONNX file that a subcommand is given."""

from __future__ import annotations

from pathlib import Path

import onnx

from torch2ort.errors import ModelLoadError


def read_model(path: Path) -> onnx.ModelProto:
    """The model of a file, without the data beside it.

    Raises:
        ModelLoadError: the file is not there, or no ONNX model; the sentence begins with its path.
    """
    try:
        model = onnx.load(path, load_external_data=False)
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path}: there is no such file") from error
    except Exception as error:
        raise ModelLoadError(f"{path}: not a readable ONNX model ({error})") from error
    if not model.HasField("graph"):
        raise ModelLoadError(f"{path}: it holds no graph: the file is empty, cut off or no ONNX model")
    return model
