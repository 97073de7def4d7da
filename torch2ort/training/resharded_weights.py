"""Weights whose memory is freed or moved between forward and backward, as FSDP and DeepSpeed do.

These libraries store a part of each weight in each process. They gather the whole weight before a module's
forward, free it afterwards, and gather it again for backward, in other memory. Eager PyTorch's backward reads
the tensor of that time. A session, and the contexts of Functions, read the address that forward was given, so
backward gets copies.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

import torch

from torch2ort.errors import EngineError
from torch2ort.training.saved_tensor_checks import Saved

# Freed memory may be allocated again at the same address, so one comparison is not enough.
_LOOKS = 3


class MovingFeeds:
    """Detection of feeds that move between forward and backward, by comparison in the first backwards."""

    def __init__(self) -> None:
        self._move = False
        self._looks = 0

    def to_copy(self, needed: Collection[int]) -> Collection[int]:
        """Return positions of the feeds of which backward has to read a copy.

        Args:
            needed: positions of those that backward reads.
        """
        # Weights are partitioned among processes; in a single process, they do not move.
        if self._move or (self._looks < _LOOKS and _among_processes()):
            return needed
        return ()

    def check_moved(self, saved: Saved, needed: Collection[int], copied: Collection[int]) -> None:
        """Compare the addresses of the feeds in forward with those in backward.

        Args:
            saved: the feeds of forward.
            needed: positions of those that backward reads.
            copied: positions of those that backward has copies of.

        Raises:
            EngineError: a feed that backward has no copy of has moved.
        """
        moved = saved.moved_positions(needed)
        self._looks += 1
        # Checked in every backward; only processes with DeepSpeed pay for the second look.
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
    """Return True if DeepSpeed gathers some feeds in each step, even if by chance at the same address."""
    return any(hasattr(feed, "ds_status") for feed in feeds)


def _among_processes() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
