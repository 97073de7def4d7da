"""Estimated times of the operators of a joint graph, in nanoseconds of one thread.

The weights were measured on an Intel Xeon with AVX-512, with cold memory. Decisions depend on ratios of
operators, which differ less between processors than the times do.
"""

from __future__ import annotations

import math
import operator
from typing import Any, cast

import torch

from torch2ort._torch.dispatch import OpOverload
from torch2ort.differentiate.aliasing import VIEWS
from torch2ort.differentiate.symbolic_shapes import elements
from torch2ort.program.kernel_sites import arguments_of
from torch2ort.sizes.symbols import size_hint

# Nanoseconds of a multiplication and an addition in a matrix product.
_MULTIPLICATION = 0.02
# Nanoseconds per element of an operator that mainly reads and writes memory, and nanoseconds of a call.
_PASS, _CALL = 0.6, 3000.0
# Nanoseconds per element of operators that compute more.
_PER_ELEMENT = {
    **dict.fromkeys(
        ("cos", "elu", "exp", "expm1", "log", "log1p", "sigmoid", "silu", "sin", "softplus"), 1.2
    ),
    **dict.fromkeys(("erf", "gelu", "mish", "pow", "tanh"), 1.5),
    **dict.fromkeys(("_log_softmax", "_softmax", "native_layer_norm"), 1.0),
    **dict.fromkeys(("gelu_backward", "native_layer_norm_backward"), 2.0),
    **dict.fromkeys(("native_batch_norm", "native_batch_norm_backward", "native_group_norm"), 2.0),
}
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def estimated_nanoseconds(node: torch.fx.Node) -> float:
    """Return the time of one operator; zero for a view, and for a node that is no operator.

    Args:
        node: of a joint graph, which is functional.
    """
    if node.op != "call_function" or node.target is operator.getitem or node.target in VIEWS:
        return 0.0
    made = node.meta.get("val")
    tensors = [
        t for t in (made if isinstance(made, (list, tuple)) else [made]) if isinstance(t, torch.Tensor)
    ]
    read = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    largest = max((elements(t) for t in (*tensors, *read)), default=0)
    name = node.target._schema.name.removeprefix("aten::") if isinstance(node.target, OpOverload) else ""
    return _CALL + _PER_ELEMENT.get(name, _PASS) * largest + _MULTIPLICATION * _multiplications(node, name)


def _multiplications(node: torch.fx.Node, name: str) -> float:
    """Return the number of multiplications in a matrix product, a convolution or attention; 0 for others."""
    if name in ("addmm", "baddbmm", "bmm", "mm"):
        rows = node.all_input_nodes[-2].meta["val"].shape[-1] if len(node.all_input_nodes) > 1 else 1
        return float(elements(node.meta["val"]) * size_hint(rows))
    if name.startswith(_ATTENTION):
        arguments = arguments_of(node)
        query, key = (cast(torch.fx.Node, arguments[n]).meta["val"] for n in ("query", "key"))
        # Two products in forward, five in backward.
        return (5.0 if name != _ATTENTION else 2.0) * elements(query) * size_hint(key.shape[-2])
    if name in ("convolution", "convolution_backward"):
        return _of_convolution(arguments_of(node), node, name)
    return 0.0


def _of_convolution(arguments: dict[str, Any], node: torch.fx.Node, name: str) -> float:
    weight = arguments["weight"].meta["val"]
    if name == "convolution":
        places = elements(node.meta["val"])
        return float(places * math.prod(map(size_hint, weight.shape[1:])))
    wanted = sum(map(bool, arguments["output_mask"][:2]))
    return float(wanted * elements(arguments["grad_output"].meta["val"]) * elements(weight) / weight.shape[0])
