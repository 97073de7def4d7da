"""What a backward reads from outside, and eager PyTorch's refusal of it when it was written to since."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch2ort._torch import autograd as private
from torch2ort.pythonop.native import native


class Saved:
    """What a forward was given and what it gave, as they were when it ended.

    Args:
        feeds: what it was given.
        outputs: position -> an alias of an output whose memory backward reads. The outputs themselves hold
            the step, and would keep it alive in a circle.

    Attributes:
        feeds: what it was given.
    """

    __slots__ = ("_noted", "_outputs", "feeds")

    def __init__(self, feeds: tuple[torch.Tensor, ...], outputs: dict[int, torch.Tensor]) -> None:
        self.feeds = feeds
        self._noted = native.Noted(feeds, private.version_of)
        self._outputs = outputs

    def moved(self, positions: Iterable[int]) -> list[int]:
        """Positions of the feeds among these that lie elsewhere now."""
        return self._noted.moved(positions)

    def check_feeds(self, positions: Iterable[int]) -> None:
        """Refuse what eager PyTorch refuses: a feed that is read again was written to since.

        Args:
            positions: of the feeds that are read.

        Raises:
            RuntimeError: one of them has another version.
        """
        for position, version, expected in self._noted.written(positions):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: {_kind(self.feeds[position])} is at version {version}; expected version "
                f"{expected} instead. Clone it before the model's forward, or change it after backward"
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
