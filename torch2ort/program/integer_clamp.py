"""Bounds of ``clamp`` that an integer dtype cannot represent, converted as the installed torch does.

torch 2.13 wraps -1 to 255 for bytes and refuses 300. torch 2.15 treats either as no bound, and refuses a
lower bound above all numbers of the dtype, or an upper bound below. A trace shows none of that.
"""

from __future__ import annotations

import torch

from torch2ort.errors import DtypeError
from torch2ort.support.provenance import source_line

aten = torch.ops.aten
_CLAMPS = {
    **dict.fromkeys(
        (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.hardtanh.default),
        aten.clamp.default,
    ),
    **dict.fromkeys(
        (aten.clamp_.default, aten.clamp_min_.default, aten.clamp_max_.default, aten.hardtanh_.default),
        aten.clamp_.default,
    ),
}


def normalize_clamp_bounds(graph: torch.fx.Graph) -> None:
    """Replace bounds by the numbers that the installed torch converts them to.

    Args:
        graph: the nodes of a program before clamps are decomposed.

    Raises:
        DtypeError: eager PyTorch would refuse a bound at run time.
    """
    for node in graph.nodes:
        clamp = _CLAMPS.get(node.target)
        if clamp is None:
            continue
        dtype = node.meta["val"].dtype
        if dtype.is_floating_point or dtype == torch.bool or node.args[0].meta["val"].dtype != dtype:
            continue
        ends = torch.iinfo(dtype)
        bounds = [*node.args[1:], *node.kwargs.values()]
        if not any(isinstance(b, (int, float)) and not ends.min <= b <= ends.max for b in bounds):
            continue
        numbers = torch.tensor([ends.min, ends.max], dtype=dtype)
        try:
            # The results for the dtype's two ends bound those of every other number.
            lowest, highest = node.target(numbers, *node.args[1:], **node.kwargs).tolist()
        except RuntimeError as error:
            raise DtypeError(
                f"{node.target} at {source_line(node)}: eager PyTorch refuses its bounds for {dtype} "
                f"({error}). Take bounds that the dtype holds"
            ) from None
        node.target = clamp
        node.args, node.kwargs = (node.args[0], lowest, highest), {}
