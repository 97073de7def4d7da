"""Arguments, sizes and names of a program's nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch2ort.support.provenance import source_line

ATTENTION = "scaled_dot_product_attention"
LOSSES = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd"})
# Products with weights.
PRODUCTS = frozenset({"linear", "mm", "addmm", "matmul"})
REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "var", "std", "linalg_vector_norm", "norm", "argmax"})
VIEWS = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten"})
# Operators on each element without the tag that says so.
_MORE_POINTWISE = frozenset(
    {"where", "masked_fill", "multiply", "subtract", "divide", "log_sigmoid", "silu", "mish", "type_as"}
)


def args_of(node: torch.fx.Node) -> Any:
    """Return the arguments of a node."""
    return node.args


def rank_of(node: torch.fx.Node) -> int:
    """Return the number of dimensions of a node's tensor."""
    return len(node.meta["val"].shape)


def name_of(node: torch.fx.Node) -> str:
    """Return the name of a node's operator in ATen, without its overload; empty for other nodes."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.name.startswith("aten::"):
        return ""
    return str(schema.name).removeprefix("aten::")


def is_pointwise(node: torch.fx.Node) -> bool:
    """Return True if each element of a node's result depends on the same element of its arguments."""
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return False
    return torch.Tag.pointwise in tags or name_of(node) in _MORE_POINTWISE


def argument(node: torch.fx.Node, name: str) -> Any:
    """Return an argument of an operator by its name, or the argument's default value."""
    args = args_of(node)
    for i, parameter in enumerate(schema_of(node).arguments):
        if parameter.name == name:
            return args[i] if i < len(args) else node.kwargs.get(name, parameter.default_value)
    return None


def schema_of(node: torch.fx.Node) -> Any:
    """Return the schema of a node's operator; ``None`` for other calls."""
    return getattr(node.target, "_schema", None)


def shape_of(node: torch.fx.Node) -> Sequence[Any]:
    """Return the sizes of a node's tensor."""
    shape: Sequence[Any] = node.meta["val"].shape
    return shape


def describe(node: torch.fx.Node) -> str:
    """Return an operator and its line in the model."""
    if node.op == "output":
        return "an output of the model"
    return f"{name_of(node) or node.target} at {source_line(node)}"


def is_empty(node: torch.fx.Node) -> bool:
    """Return True for a tensor of the size (0,), which `cat` ignores."""
    shape = shape_of(node)
    return len(shape) == 1 and isinstance(shape[0], int) and shape[0] == 0
