"""What every engine that trains a graph gives to the autograd boundary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from torch2ort.engines.moving import MovingFeeds
from torch2ort.engines.saved import Saved


class ForwardState(Protocol):
    """What one forward leaves for its backward; only the engine that made it looks inside."""


class Engine(Protocol):
    """Runs a graph forward, and backward when autograd hands over the gradients of its outputs.

    Attributes:
        differentiable: positions of the fetched outputs that depend on a tensor that requires gradients.
        needed: positions of the feeds that the backward half reads, so that they must not change
            between forward and backward.
        read_outputs: positions of the fetched outputs whose memory the backward half reads.
        copied: positions of the feeds that the model itself writes to and that backward reads: what
            it reads is a copy from before.
        weights: names of the tensors that are fed behind the model's inputs.
        moving: whether feeds lie elsewhere in backward than they did in forward.
    """

    differentiable: tuple[int, ...]
    needed: tuple[int, ...]
    read_outputs: tuple[int, ...]
    copied: tuple[int, ...]
    weights: tuple[str, ...]
    moving: MovingFeeds

    def anew(self) -> Engine:
        """The same engine with sessions of its own."""
        ...

    def forward(self, feeds: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """Run the forward half.

        Args:
            feeds: the model's inputs, then its weights.

        Returns:
            The fetched outputs, and the state for :meth:`backward`.

        Raises:
            EngineError: ONNX Runtime failed. An exception of a Function arrives as it is.
        """
        ...

    def backward(
        self, state: Any, saved: Saved, gradients: Sequence[torch.Tensor | None], *, keep: bool
    ) -> list[torch.Tensor | None]:
        """Run the backward half.

        Args:
            state: what :meth:`forward` left.
            saved: what it was given, as its backward is allowed to read it.
            gradients: one per fetched output; ``None`` where the loss does not depend on it.
            keep: whether another backward of this state may come.

        Returns:
            One entry per feed: its gradient, or ``None`` where autograd would give none.

        Raises:
            EngineError: ONNX Runtime failed, or this state serves no second backward. An exception of a
                Function arrives as it is.
        """
        ...
