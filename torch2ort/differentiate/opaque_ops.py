"""Operators that autograd differentiates as a whole, in PyTorch's kernels.

A recurrent net is one operator of torch2ort's own in a trace. The parts of some operators of linear algebra
check values while they run. The derivative of a product has another formula in a trace. As calls of PyTorch's
kernels, these operators are like calls of Functions: their derivatives are opaque, and PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch2ort._torch.dispatch import OpOverload
from torch2ort.kernels.custom_ops import is_foreign
from torch2ort.kernels.recurrent import is_recurrent
from torch2ort.program.aten_fallback_policy import CHECKING
from torch2ort.program.gradient_flow import carrying
from torch2ort.program.kernel_sites import SiteMaker, arguments_of
from torch2ort.program.runtime_assertions import READS
from torch2ort.pythonop import Site

# For a product, autograd counts the zeros among the factors, and uses another formula in a trace, which
# cannot count them. The results differ where the product is NaN. So does the gradient of the smallest of all
# elements: in a trace it is multiplied by 0 or 1. The other operators refuse classes that do not exist; their
# parts do not.
_EAGERS_OWN = frozenset(
    {
        torch.ops.aten.max.default,
        torch.ops.aten.median.default,
        torch.ops.aten.min.default,
        torch.ops.aten.nanmedian.default,
        torch.ops.aten.multi_margin_loss.default,
        torch.ops.aten.multilabel_margin_loss.default,
        torch.ops.aten.multilabel_margin_loss_forward.default,
        torch.ops.aten.one_hot.default,
        torch.ops.aten.prod.default,
        torch.ops.aten.prod.dim_int,
    }
)

# Recurrent nets and operators of libraries stay whole, too.
STAY_WHOLE = _EAGERS_OWN | CHECKING


def keep_whole(
    graph: torch.fx.Graph, required: Iterable[torch.fx.Node], *, if_differentiated: bool = False
) -> list[Site]:
    """Replace operators that stay whole by calls of PyTorch's kernels.

    Args:
        graph: the nodes of a program, regions without gradient inlined; changed in place.
        required: placeholders that require a gradient.
        if_differentiated: replace only the operators that carry a gradient.

    Returns:
        The sites of the calls, which the caller must keep alive.

    Raises:
        UnsupportedOperatorError: an operator has an argument or a result that a graph cannot represent.
    """
    # Without PyTorch's kernels, those of libraries are not available either.
    has_libraries = not if_differentiated
    chosen = [n for n in graph.nodes if _stays_whole(n) or (has_libraries and is_foreign(n.target))]
    if not chosen:
        return []
    carried = carrying(graph, required)
    if if_differentiated:
        chosen = [node for node in chosen if node in carried]
    maker = SiteMaker(graph, carried, has_libraries=has_libraries)
    for node in chosen:
        maker.replace(node)
    return maker.sites


def _stays_whole(node: torch.fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    if any(read.target in READS for read in node.all_input_nodes):
        return True  # no half holds numbers
    return is_recurrent(node.target) or node.target in STAY_WHOLE or _is_bag_in_bfloat16(node)


def _is_bag_in_bfloat16(node: torch.fx.Node) -> bool:
    """Return True if ``node`` computes another number of positions than PyTorch's fake kernel says."""
    if node.target is not torch.ops.aten.embedding_bag.padding_idx or arguments_of(node)["sparse"]:
        return False
    return bool(node.meta["val"][0].dtype == torch.bfloat16)
