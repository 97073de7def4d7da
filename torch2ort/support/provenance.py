"""Where an operator comes from: its line in the user's model, and a graph's node in the program."""

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

# What the nodes of a trace say of the model's code; of a joint graph's backward, what forward's say.
_ORIGIN = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack")


def origin_of(node: torch.fx.Node) -> dict[str, Any]:
    """What the metadata of ``node`` says of the model's code, for a node that stands for it."""
    return {name: node.meta[name] for name in _ORIGIN if name in node.meta}


def source_line(node: torch.fx.Node) -> str:
    """``model.py:12, in forward: y = x.unfold(0, 2, 1)``, the innermost line that is the user's."""
    return describe(node.meta.get("stack_trace") or "")


def files_of(node: torch.fx.Node) -> list[str]:
    """Files of the code that a node was traced from, outermost first; empty where that is not known."""
    return [frame["file"] for frame in _FRAME.finditer(node.meta.get("stack_trace") or "")]


def places_of(node: torch.fx.Node) -> list[tuple[str, int]]:
    """File and line of the calls that a node was traced from."""
    return [
        (f["file"], int(f["line"]))
        for f in _FRAME.finditer(node.meta.get("stack_trace") or "")
        if is_users(f["file"])
    ]


def describe(stack_trace: str) -> str:
    """The innermost frame of ``stack_trace`` that is the user's, in one line."""
    frames = list(_FRAME.finditer(stack_trace))
    users = [f for f in frames if is_users(f["file"])] or [f for f in frames if not f["file"].startswith("<")]
    if not users:
        return "an unknown line of the model"
    frame = users[-1]
    code = (frame["code"] or "").strip()
    return f"{frame['file']}:{frame['line']}, in {frame['function']}" + (f": {code}" if code else "")


def fx_name(node: ir.Node) -> str:
    """Name of the FX node that ``node`` was translated from, or its own."""
    scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes")
    return scopes.rsplit("'", 2)[-2] if scopes and "'" in scopes else str(node.name)


def operator_of(node: ir.Node) -> str:
    """PyTorch's operator that ``node`` was translated from, or its own."""
    classes = node.metadata_props.get("pkg.torch.onnx.class_hierarchy")
    return classes.rsplit("'", 2)[-2] if classes and "'" in classes else node.op_type


def line_of(node: ir.Node) -> str:
    """As :func:`source_line`, of a node of a graph."""
    return describe(node.metadata_props.get("pkg.torch.onnx.stack_trace", ""))
