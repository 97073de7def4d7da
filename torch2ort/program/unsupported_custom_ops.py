"""Refusal of calls of libraries' operators that no graph can represent."""

from __future__ import annotations

from collections.abc import Container

import torch

from torch2ort.errors import UnsupportedOperatorError
from torch2ort.kernels.custom_ops import is_of_library, unfit
from torch2ort.support.provenance import source_line


def refuse_unsupported_custom_ops(program: torch.fx.GraphModule, translated: Container[object]) -> None:
    """Refuse calls of operators that have effects besides new tensors.

    Args:
        program: the program as it was traced, submodules included.
        translated: operators that users registered translations of.

    Raises:
        UnsupportedOperatorError: with the first such operator, its line, and what to do.
    """
    for module in program.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if is_of_library(node.target) and node.target not in translated:
                refuse_unsupported_custom_op(node)


def refuse_unsupported_custom_op(node: torch.fx.Node) -> None:
    """Refuse a call of a library's operator that has effects besides new tensors.

    Raises:
        UnsupportedOperatorError: with the effect, its line, and what to do.
    """
    reason = unfit(node.target)  # type: ignore[arg-type]
    if reason is None and any(map(_is_complex, (node, *node.all_input_nodes))):
        reason = (
            "computes with complex numbers, which no ONNX graph takes from it. Put the complex part of the "
            "model into a torch.autograd.Function"
        )
    if reason is not None:
        raise UnsupportedOperatorError(f"{node.target} at {source_line(node)} {reason}")


def _is_complex(node: torch.fx.Node) -> bool:
    values = node.meta.get("val")
    several = values if isinstance(values, (list, tuple)) else (values,)
    return any(isinstance(value, torch.Tensor) and value.is_complex() for value in several)
