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
    """Write ``model`` to ``NNN_<stage>.onnx`` in the folder ``options.save_onnx_dir``, if it is set.

    Args:
        options: the settings; the folder is created if it does not exist.
        stage: the kind of graph: ``exported``, ``gradient``.
        model: the graph.
        names: readable names of some of its values, used in the file.
    """
    path = _path(options, stage)
    if path is not None:
        if names and not isinstance(model, bytes):
            model = _renamed(model, names)
        path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())


def save_optimized(options: Options, stage: str, settings: Any) -> None:
    """Set ``settings`` so that the session made with them writes its optimized graph."""
    path = _path(options, stage)
    if path is not None:
        settings.optimized_model_filepath = str(path)


def _renamed(model: onnx.ModelProto, names: Mapping[str, str]) -> onnx.ModelProto:
    """Return a copy with other names of values; a new name that is already used is ignored."""
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
