"""Operators that autograd is to differentiate as a whole, in PyTorch's kernels.

A recurrent net is one operator of torch2ort's own in a trace, the parts of some calculations with matrices
check a value as they go, and the derivative of a product goes another way in a trace. As a call of PyTorch's
kernel each is what a call of a Function is: its derivative is opaque, and PyTorch's own.
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

# Autograd asks a product how many zeros are in it, and goes another way in a trace, which cannot say. It
# differs where the product is no number. So does the gradient of the smallest of all: in a trace it is
# multiplied by 0 or 1. The others refuse classes that there are not; their parts do not.
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

# Recurrent nets and operators of libraries besides.
STAY_WHOLE = _EAGERS_OWN | CHECKING


def keep_whole(
    graph: torch.fx.Graph, required: Iterable[torch.fx.Node], *, if_differentiated: bool = False
) -> list[Site]:
    """Make calls of PyTorch's kernels of the operators that stay whole.

    Args:
        graph: the nodes of a program, regions without gradient inlined; changed in place.
        required: placeholders that require a gradient.
        if_differentiated: whether only those do that carry a gradient.

    Returns:
        The sites of the calls, which live as long as somebody holds them.

    Raises:
        UnsupportedOperatorError: one takes or gives something that a graph cannot hold.
    """
    # Where PyTorch's kernels are not there, those of libraries are neither.
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
    """Whether ``node`` gives places of another number than PyTorch's fake kernel says."""
    if node.target is not torch.ops.aten.embedding_bag.padding_idx or arguments_of(node)["sparse"]:
        return False
    return bool(node.meta["val"][0].dtype == torch.bfloat16)
