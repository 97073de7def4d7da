"""Tensors that backward reads, and eager PyTorch's error where one was written to since forward."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch2ort._torch import autograd as private
from torch2ort.pythonop.native import native


class Saved:
    """The feeds of a forward and some of its outputs, with their versions and addresses when it ended.

    Args:
        feeds: the tensors that forward was fed with.
        outputs: position -> an alias of an output whose memory backward reads. The outputs themselves refer
            to the step, and would form a reference cycle with it.

    Attributes:
        feeds: the tensors that forward was fed with.
    """

    __slots__ = ("_noted", "_outputs", "feeds")

    def __init__(self, feeds: tuple[torch.Tensor, ...], outputs: dict[int, torch.Tensor]) -> None:
        self.feeds = feeds
        self._noted = native.Noted(feeds, private.version_of)
        self._outputs = outputs

    def moved_positions(self, positions: Iterable[int]) -> list[int]:
        """Return the positions of the feeds among these whose memory is elsewhere now."""
        return self._noted.moved(positions)

    def check_feeds(self, positions: Iterable[int]) -> None:
        """Refuse a feed that backward reads and that was written to since forward, as eager PyTorch does.

        Args:
            positions: those of the feeds that are read.

        Raises:
            RuntimeError: the version of one of them has changed.
        """
        for position, version, expected in self._noted.written(positions):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: {_kind(self.feeds[position])} is at version {version}; expected version "
                f"{expected} instead. Clone it before the model's forward, or change it after backward"
            )

    def check_outputs(self) -> None:
        """Refuse an output that backward reads and that was written to since forward, as eager PyTorch does.

        Raises:
            RuntimeError: the version of one of them has changed.
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
