"""Graphs on disk, for ``Options.save_onnx_dir``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from torch2ort.options import Options

_serial = itertools.count(1)


def save_stage(
    options: Options, stage: str, model: onnx.ModelProto | bytes, names: Mapping[str, str] | None = None
) -> None:
    """Write ``model`` to ``NNN_<stage>.onnx`` in the folder that the options name, if they name one.

    Args:
        options: settings of which ``save_onnx_dir`` is read; the folder is made.
        stage: what the graph is: ``exported``, ``gradient``.
        model: the graph.
        names: what some of its values are called in the file, which people read.
    """
    path = _path(options, stage)
    if path is not None:
        if names and not isinstance(model, bytes):
            model = _renamed(model, names)
        path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())


def save_optimized(options: Options, stage: str, settings: Any) -> None:
    """Let the session that is made with ``settings`` write what it runs in the end."""
    path = _path(options, stage)
    if path is not None:
        settings.optimized_model_filepath = str(path)


def _renamed(model: onnx.ModelProto, names: Mapping[str, str]) -> onnx.ModelProto:
    """A copy with other names of values; a name that is taken is not given again."""
    taken = {name for node in model.graph.node for name in (*node.input, *node.output)} - names.keys()
    new: dict[str, str] = {}
    for old, name in names.items():
        if name not in taken:
            new[old] = name
            taken.add(name)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = new.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [new.get(name, name) for name in node.input]
        node.output[:] = [new.get(name, name) for name in node.output]
    return copy


def _path(options: Options, stage: str) -> Path | None:
    if options.save_onnx_dir is None:
        return None
    folder = Path(options.save_onnx_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{next(_serial):03d}_{stage}.onnx"
