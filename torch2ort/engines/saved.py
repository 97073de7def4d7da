"""What a backward reads from outside, and eager PyTorch's refusal of it when it was written to since."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from torch2ort.engines import _torch_private as private


class Saved:
    """What a forward was given and what it gave, as they were when it ended.

    Args:
        feeds: what it was given.
        outputs: position -> an alias of an output whose memory backward reads. The outputs themselves hold
            the step, and would keep it alive in a circle.

    Attributes:
        feeds: what it was given.
    """

    __slots__ = ("_outputs", "_versions", "feeds")

    def __init__(self, feeds: Sequence[torch.Tensor], outputs: dict[int, torch.Tensor]) -> None:
        self.feeds = feeds
        self._versions = list(map(private.version_of, feeds))
        self._outputs = outputs

    def check_feeds(self, positions: Iterable[int]) -> None:
        """Refuse what eager PyTorch refuses: a feed that is read again was written to since.

        Args:
            positions: of the feeds that are read.

        Raises:
            RuntimeError: one of them has another version.
        """
        for position in positions:
            feed, expected = self.feeds[position], self._versions[position]
            version = private.version_of(feed)
            if version != expected:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace "
                    f"operation: {_kind(feed)} is at version {version}; expected version {expected} instead. "
                    f"Clone it before the model's forward, or change it after backward"
                )

    def check_outputs(self) -> None:
        """Refuse what eager PyTorch refuses: an output that backward reads was written to since.

        Raises:
            RuntimeError: one of them has another version.
        """
        for position, output in self._outputs.items():
            version = private.version_of(output)
            if version:
                raise RuntimeError(
                    f"one of the variables needed for gradient computation has been modified by an inplace "
                    f"operation: {_kind(output)}, which is output {position} of the model, is at version "
                    f"{version}; expected version 0 instead. Write to a clone of it, or after backward"
                )


def _kind(tensor: torch.Tensor) -> str:
    return f"a tensor of {str(tensor.dtype).removeprefix('torch.')} and shape {list(tensor.shape)}"
