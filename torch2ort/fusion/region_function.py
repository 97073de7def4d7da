"""The Function that a graph calls for a fused region."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from torch2ort._torch import dispatch as private


class FusedRegion(Function):
    """Several operators in one kernel. It has no backward, as it is part of a half of a step."""

    @staticmethod
    def forward(ctx: Any, text: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs of the region that ``text`` describes."""
        # These modules are slow to import, and most graphs have no region.
        from torch2ort.fusion.compiled_regions import runner_of
        from torch2ort.fusion.region import decode_region

        region = decode_region(text)
        if private.is_abstract(tensors):
            return region.run(tensors)
        region.check(tensors)
        if not region.is_compiled_for(tensors):
            return region.run(tensors)
        return tuple(runner_of(text)(list(tensors)))
