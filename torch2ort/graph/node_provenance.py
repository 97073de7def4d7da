"""The origin of a node of a saved or exported graph: the module around it, and the line of the model."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch

from torch2ort.pythonop import Site

_PREFIX = "model"
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
# Frames of these packages are between the user's frame and the operator: their folders here, and on other
# machines.
_HERE = tuple(str(Path(file).parent) + os.sep for file in (str(torch.__file__), str(Path(__file__).parent)))
_INSTALLED = re.compile(r"-packages[/\\](torch2ort|torch|onnxruntime|onnxscript)[/\\]|^<")


@dataclass(frozen=True)
class Origin:
    """The origin of a node.

    Attributes:
        module: path of the module that computes it, ``""`` for the model itself.
        kind: class of that module, ``""`` if unknown.
        line: the innermost line of the user's code, as ``file.py:12``; ``""`` if unknown.
    """

    module: str
    kind: str
    line: str

    @classmethod
    def of(cls, node: onnx.NodeProto) -> Origin:
        """Return the origin in the metadata of a node."""
        texts = {p.key: p.value for p in node.metadata_props}
        scopes = _names(texts.get("pkg.torch.onnx.name_scopes", ""))[1:-1]
        kinds = _names(texts.get("pkg.torch.onnx.class_hierarchy", ""))[1:-1]
        module = scopes[-1].removeprefix(_PREFIX).removeprefix(".") if scopes else ""
        kind = kinds[len(scopes) - 1] if scopes and len(kinds) >= len(scopes) else ""
        return cls(module, kind.rpartition(".")[2], _line(texts.get("pkg.torch.onnx.stack_trace", "")))


def kernel_name(site: Site) -> str:
    """Return the name of the Function, or of the operator of PyTorch whose kernel a site calls."""
    for value in site.constants.values() if site.internal else ():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            namespace, _, name = json.loads(value)["operator"].rpartition("::")
            return f"torch.ops.{namespace or 'aten'}.{name}"
    return site.func_name


def kernels_said(nodes: Iterable[onnx.NodeProto], sites: Mapping[str, Site]) -> str:
    """Return the names of the kernels that nodes call, each once, with its line; empty if there are none.

    Args:
        nodes: the calls.
        sites: by the names of the nodes.
    """
    said: dict[str, None] = {}
    for node in nodes:
        name, line = kernel_name(sites[node.name]), Origin.of(node).line
        said[f"{name} ({line})" if line else name] = None
    return ", ".join(said)


def _names(text: str) -> list[str]:
    """Return the list of names that torch.onnx wrote; an empty one if it is damaged."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return []
    return [str(name) for name in found] if isinstance(found, list) else []


def _line(stack: str) -> str:
    found = [f for f in _FRAME.finditer(stack) if not f["file"].startswith(_HERE)]
    frames = [f for f in found if not _INSTALLED.search(f["file"])]
    return f"{frames[-1]['file']}:{frames[-1]['line']}" if frames else ""
