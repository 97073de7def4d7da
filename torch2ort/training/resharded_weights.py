"""Weights whose memory is freed or moved between forward and backward, as FSDP and DeepSpeed do.

They keep a part of each weight, gather the whole in front of a module's forward, free it behind, and gather
it again for backward, into other memory. Eager PyTorch's backward reads the tensor of then; a session reads
the address that forward was given, and so do the contexts of Functions. Their backward is given copies.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

import torch

from torch2ort.errors import EngineError
from torch2ort.training.saved_tensor_checks import Saved

# Memory that was freed may be given out again at the same address, so one look is not enough.
_LOOKS = 3


class MovingFeeds:
    """Whether feeds of an engine move between forward and backward; the first backwards tell."""

    def __init__(self) -> None:
        self._move = False
        self._looks = 0

    def to_copy(self, needed: Collection[int]) -> Collection[int]:
        """Positions of the feeds of which backward has to read a copy.

        Args:
            needed: those that it reads.
        """
        # Weights are parted among processes; where there is one alone, nobody moves them.
        if self._move or (self._looks < _LOOKS and _among_processes()):
            return needed
        return ()

    def look(self, saved: Saved, needed: Collection[int], copied: Collection[int]) -> None:
        """Compare where the feeds were in forward with where they are in its backward.

        Args:
            saved: the feeds.
            needed: positions of those that backward reads.
            copied: of those that it has copies of.

        Raises:
            EngineError: one of which backward has no copy has moved.
        """
        moved = saved.moved(needed)
        self._looks += 1
        # Every backward asks, and few processes have DeepSpeed.
        if moved or ("deepspeed" in sys.modules and _by_deepspeed(saved.feeds)):
            self._move = True
        for position in moved:
            if position in copied:
                continue
            tensor = saved.feeds[position]
            kind = f"a tensor of {str(tensor.dtype).removeprefix('torch.')} and shape {list(tensor.shape)}"
            raise EngineError(
                f"ORTModule: {kind} that backward reads lies in other memory than in forward: something "
                f"freed it, or put another in its place (tensor.data = ...), where eager PyTorch reads the "
                f"new one. Do that after backward. Weights that are parted among processes are taken care of "
                f"where torch.distributed is initialised before the first step"
            )


def _by_deepspeed(feeds: Sequence[torch.Tensor]) -> bool:
    """Whether DeepSpeed gathers some, always anew, be it by chance to where they were."""
    return any(hasattr(feed, "ds_status") for feed in feeds)


def _among_processes() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
