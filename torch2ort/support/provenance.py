"""The origin of an operator: its line in the user's model, and the program's node of a graph's node."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from torch2ort.support.source_lines import is_users

if TYPE_CHECKING:
    import onnx_ir as ir

# Code that was typed into an interpreter has no text.
_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)'
    r'(?:\n(?!\s*File ")\s*(?P<code>[^\n]*))?'
)

# The metadata of a trace's nodes on the model's code; the nodes of a joint graph's backward have that of
# forward's.
_ORIGIN = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack")


def origin_of(node: torch.fx.Node) -> dict[str, Any]:
    """Return the metadata of ``node`` on the model's code, for a node that replaces it."""
    return {name: node.meta[name] for name in _ORIGIN if name in node.meta}


def source_line(node: torch.fx.Node) -> str:
    """Return the innermost line of the user's code, as ``model.py:12, in forward: y = x.unfold(0, 2, 1)``."""
    return describe(node.meta.get("stack_trace") or "")


def files_of(node: torch.fx.Node) -> list[str]:
    """Return the files of the code that a node was traced from, outermost first; empty if unknown."""
    return [frame["file"] for frame in _FRAME.finditer(node.meta.get("stack_trace") or "")]


def places_of(node: torch.fx.Node) -> list[tuple[str, int]]:
    """Return file and line of the calls in the user's code that a node was traced from."""
    return [
        (f["file"], int(f["line"]))
        for f in _FRAME.finditer(node.meta.get("stack_trace") or "")
        if is_users(f["file"])
    ]


def describe(stack_trace: str) -> str:
    """Return the innermost frame of the user's code in ``stack_trace``, in one line."""
    frames = list(_FRAME.finditer(stack_trace))
    users = [f for f in frames if is_users(f["file"])] or [f for f in frames if not f["file"].startswith("<")]
    if not users:
        return "an unknown line of the model"
    frame = users[-1]
    code = (frame["code"] or "").strip()
    return f"{frame['file']}:{frame['line']}, in {frame['function']}" + (f": {code}" if code else "")


def fx_name(node: ir.Node) -> str:
    """Return the name of the FX node that ``node`` was translated from, or its own."""
    scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes")
    return scopes.rsplit("'", 2)[-2] if scopes and "'" in scopes else str(node.name)


def operator_of(node: ir.Node) -> str:
    """Return the operator of PyTorch that ``node`` was translated from, or its own."""
    classes = node.metadata_props.get("pkg.torch.onnx.class_hierarchy")
    return classes.rsplit("'", 2)[-2] if classes and "'" in classes else node.op_type


def line_of(node: ir.Node) -> str:
    """Return the same as :func:`source_line`, for a node of a graph."""
    return describe(node.metadata_props.get("pkg.torch.onnx.stack_trace", ""))
