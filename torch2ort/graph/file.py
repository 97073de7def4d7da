"""The file that a model is saved to: an ONNX model whose metadata describes how to call it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx.external_data_helper
import torch

from torch2ort import io_schema
from torch2ort.errors import ExportError, FunctionNotFoundError, ModelLoadError
from torch2ort.graph import file_checksum
from torch2ort.graph.exact_nodes import exact_nodes
from torch2ort.graph.external_weights import content_of
from torch2ort.graph.file_checks import (
    check_calls,
    check_draws,
    check_exact,
    check_functions,
    check_interface,
)
from torch2ort.graph.file_form import run_form
from torch2ort.graph.function_calls import call_classes, function_calls
from torch2ort.graph.function_classes import bind_classes
from torch2ort.graph.graph import Graph
from torch2ort.graph.graph_json import record, recorded_graph, recorded_interface
from torch2ort.graph.graph_traversal import load_sites
from torch2ort.graph.interface import Interface
from torch2ort.graph.random_nodes import order_of_draws
from torch2ort.graph.weights import state_of, take_state
from torch2ort.kernels.functions import decode_library_call
from torch2ort.kernels.library import LibraryKernel
from torch2ort.pythonop import Site, classes_given, unstorable

METADATA_KEY = "torch2ort"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class FileContents:
    """The contents of a file.

    Attributes:
        graph: its state is among its inputs; other weights are initializers.
        state: graph input -> its initial value.
        interface: how to call it.
        training: the mode that was exported.
    """

    graph: Graph
    state: dict[str, torch.Tensor]
    interface: Interface
    training: bool


def save(path: Path, proto: onnx.ModelProto, graph: Graph, interface: Interface, *, training: bool) -> None:
    """Write a model to ``path``, atomically; above 2 GiB its weights are written to a file beside it.

    Args:
        path: the file; an existing one is replaced.
        proto: the graph with its weights; it is changed, unless it is ``graph.proto``.
        graph: the graph.
        interface: how to call it.
        training: the mode that was exported.

    Raises:
        ExportError: an argument of a Function is an object that a file cannot hold.
        OSError: the file cannot be written.
    """
    for site in graph.sites.values():
        refuse_unstorable(site)
    model = proto
    if proto is graph.proto:
        model = onnx.ModelProto()
        model.CopyFrom(proto)
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, {METADATA_KEY: _metadata(model, graph, interface, training=training)})
    _write(model, path)


def refuse_unstorable(site: Site) -> None:
    """Refuse a call that a file cannot store.

    Raises:
        ExportError: an argument is an arbitrary object, or the call is of a library's operator.
    """
    if site.function is LibraryKernel:
        name = decode_library_call(site.arguments[0]).operator.name()
        raise ExportError(
            f"{name} is an operator of a library, which no file may call. Register a translation with "
            f"torch2ort.register_symbolic, or put the call into a torch.autograd.Function"
        )
    found = unstorable(site)
    if found is not None:
        position, value = found
        raise ExportError(
            f"{site.func_name}: argument {position} is an object of type "
            f"{type(value).__qualname__}, which a file cannot hold; "
            f"pass numbers, strings, None, dtypes or tuples, lists and dicts of them instead"
        )


def _metadata(model: onnx.ModelProto, graph: Graph, interface: Interface, *, training: bool) -> str:
    return json.dumps(
        {
            "version": FORMAT_VERSION,
            "training": training,
            "signature": interface.signature.to_json(),
            "inputs": interface.inputs.to_json(),
            "outputs": interface.outputs.to_json(),
            **record(graph, interface),
            "state": state_of(graph),
            "draws": order_of_draws(graph.proto.graph, graph.sites),
            "exact": exact_nodes(model),
            "calls": [node.name for node in function_calls(model)],
        }
    )


def read(file: Path, functions: Iterable[type[torch.autograd.Function]]) -> FileContents:
    """Read a file that :func:`save` wrote.

    Args:
        file: the path.
        functions: classes; for a portable file, those that run instead of the bodies.

    Raises:
        ModelLoadError: the file is damaged, was not written by torch2ort, or calls a class with arguments
            that it does not accept.
        FunctionNotFoundError: a name is not resolved, or a portable file does not contain it; lists all of
            them.
    """
    functions = classes_given(functions)
    model, text = _opened(file)
    try:
        data = json.loads(text)
        if data["version"] != FORMAT_VERSION:
            raise ModelLoadError(
                f"written in format {data['version']!r}, this torch2ort reads {FORMAT_VERSION}"
            )
        check_functions(model)
        check_exact(model, list(data.get("exact", [])))
        check_calls(model, list(data.get("calls", [])))
        if data.get("portable", False):
            call_classes(model, functions)
        saved = _recorded(model, data)
        bind_classes(saved.graph.sites.values(), functions)
    except ModelLoadError as error:
        raise ModelLoadError(f"{file}: {error}") from error
    except FunctionNotFoundError:
        raise
    except Exception as error:  # an untrusted text may cause any error
        raise ModelLoadError(f"{file}: its torch2ort metadata is damaged ({error})") from error
    return saved


def _opened(file: Path) -> tuple[onnx.ModelProto, str]:
    """Return a model that torch2ort saved, and its metadata.

    Raises:
        ModelLoadError: the file does not contain such a model.
    """
    try:
        model = file_checksum.read(file)
        onnx.checker.check_model(content_of(model) or str(file))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{file}: there is no such file") from error
    except IsADirectoryError as error:
        raise ModelLoadError(f"{file} is a folder; give the path of the .onnx file") from error
    except ModelLoadError as error:
        raise ModelLoadError(f"{file}: {error}") from error
    except Exception as error:
        raise ModelLoadError(
            f"{file}: not a readable ONNX model ({error}); save it again with ExportedModel.save"
        ) from error
    texts = {p.key: p.value for p in model.metadata_props}
    if METADATA_KEY not in texts:
        raise ModelLoadError(
            f"{file}: an ONNX model, but not one that torch2ort saved (it has no '{METADATA_KEY}' metadata); "
            f"run it with onnxruntime.InferenceSession, or export the PyTorch model with torch2ort.export"
        )
    return model, texts[METADATA_KEY]


def _recorded(model: onnx.ModelProto, data: Mapping[str, Any]) -> FileContents:
    """Return the contents of a model and its metadata, before classes are bound.

    Args:
        model: in the form of files; it is changed.
        data: its metadata.
    """
    interface = recorded_interface(
        data,
        io_schema.Signature.from_json(data["signature"]),
        io_schema.Schema.from_json(data["inputs"]),
        io_schema.Schema.from_json(data["outputs"]),
    )
    run_form(model)
    sites = load_sites(model.graph)
    state = dict(data.get("state", {}))
    values = take_state(model, state)
    graph = recorded_graph(data, model, sites, state)
    check_interface(graph, interface.inputs, interface.outputs, interface.sizes, interface.returned)
    check_draws(graph, list(data.get("draws", [])))
    return FileContents(graph, values, interface, bool(data["training"]))


def _write(model: onnx.ModelProto, path: Path) -> None:
    """Write a temporary file beside ``path`` and rename it: a reader sees the old file or the new one."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the path of a file, as {path / 'model.onnx'}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}; make it first")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        file = Path(folder, path.name)
        content = content_of(model)
        if content is None:
            content = _write_data(model, file.with_name(f"{path.name}.data"))
        with file.open("wb") as opened:
            opened.writelines(file_checksum.sealed(content))
        for written in sorted(Path(folder).iterdir(), reverse=True):
            # The data file comes before the model that refers to it.
            os.replace(written, path.with_name(written.name))


def _write_data(model: onnx.ModelProto, path: Path) -> bytes:
    """Move the weights of ``model`` to the file ``path``; return the rest, serialized."""
    onnx.external_data_helper.convert_model_to_external_data(model, location=path.name)
    onnx.external_data_helper.write_external_data_tensors(model, str(path.parent))
    file_checksum.seal_data(model, path)
    content: bytes = model.SerializeToString()
    return content
