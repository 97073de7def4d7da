"""Graphs on disk, for ``Options.save_onnx_dir``."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import onnx

from torch2ort.options import Options

_serial = itertools.count(1)


def save_stage(options: Options, stage: str, model: onnx.ModelProto | bytes) -> None:
    """Write ``model`` to ``NNN_<stage>.onnx`` in the folder that the options name, if they name one.

    Args:
        options: settings of which ``save_onnx_dir`` is read; the folder is made.
        stage: what the graph is: ``exported``, ``gradient``.
        model: the graph.
    """
    path = _path(options, stage)
    if path is not None:
        path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())


def save_optimized(options: Options, stage: str, settings: Any) -> None:
    """Let the session that is made with ``settings`` write what it runs in the end."""
    path = _path(options, stage)
    if path is not None:
        settings.optimized_model_filepath = str(path)


def _path(options: Options, stage: str) -> Path | None:
    if options.save_onnx_dir is None:
        return None
    folder = Path(options.save_onnx_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{next(_serial):03d}_{stage}.onnx"
