"""Where a node of a saved or exported graph comes from: the module around it, and the line of the model."""

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
# Frames of these are between the user's and the operator: where they are here, and anywhere else.
_HERE = tuple(str(Path(file).parent) + os.sep for file in (str(torch.__file__), str(Path(__file__).parent)))
_INSTALLED = re.compile(r"-packages[/\\](torch2ort|torch|onnxruntime|onnxscript)[/\\]|^<")


@dataclass(frozen=True)
class Origin:
    """Where a node comes from.

    Attributes:
        module: path of the module that computes it, ``""`` for the model itself.
        kind: class of that module, ``""`` where nothing is known.
        line: ``file.py:12``, the innermost line of the user's; ``""`` where nothing is known.
    """

    module: str
    kind: str
    line: str

    @classmethod
    def of(cls, node: onnx.NodeProto) -> Origin:
        """What the metadata of a node says."""
        texts = {p.key: p.value for p in node.metadata_props}
        scopes = _names(texts.get("pkg.torch.onnx.name_scopes", ""))[1:-1]
        kinds = _names(texts.get("pkg.torch.onnx.class_hierarchy", ""))[1:-1]
        module = scopes[-1].removeprefix(_PREFIX).removeprefix(".") if scopes else ""
        kind = kinds[len(scopes) - 1] if scopes and len(kinds) >= len(scopes) else ""
        return cls(module, kind.rpartition(".")[2], _line(texts.get("pkg.torch.onnx.stack_trace", "")))


def kernel_name(site: Site) -> str:
    """The Function, or the operator of PyTorch whose kernel a site calls."""
    for value in site.constants.values() if site.internal else ():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            namespace, _, name = json.loads(value)["operator"].rpartition("::")
            return f"torch.ops.{namespace or 'aten'}.{name}"
    return site.func_name


def kernels_said(nodes: Iterable[onnx.NodeProto], sites: Mapping[str, Site]) -> str:
    """What calls of kernels run, each once with its line; empty without calls.

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
    """The list of names that torch.onnx wrote; a damaged one is empty."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return []
    return [str(name) for name in found] if isinstance(found, list) else []


def _line(stack: str) -> str:
    found = [f for f in _FRAME.finditer(stack) if not f["file"].startswith(_HERE)]
    frames = [f for f in found if not _INSTALLED.search(f["file"])]
    return f"{frames[-1]['file']}:{frames[-1]['line']}" if frames else ""
