"""What every engine that trains a graph gives to the autograd boundary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


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
        read: positions of the other feeds.
        uses_rng: whether a run draws from PyTorch's random generator.
        weights: names of the tensors that are fed behind the model's inputs.
        states_last: whether a state serves more than one backward; else forward is run again for the next.
    """

    differentiable: tuple[int, ...]
    needed: tuple[int, ...]
    read_outputs: tuple[int, ...]
    copied: tuple[int, ...]
    read: tuple[int, ...]
    uses_rng: bool
    weights: tuple[str, ...]
    states_last: bool

    @property
    def remembering(self) -> str:
        """Name of a Function by which a second run of forward would show elsewhere; empty if none."""
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
        self, state: Any, gradients: Sequence[torch.Tensor | None], *, keep: bool
    ) -> list[torch.Tensor | None] | None:
        """Run the backward half.

        Args:
            state: what :meth:`forward` left.
            gradients: one per fetched output; ``None`` where the loss does not depend on it.
            keep: whether another backward of this state may come; only where :attr:`states_last`.

        Returns:
            One entry per feed: its gradient, or ``None`` where autograd would give none. ``None`` as a whole
            if the state cannot serve any more: the forward must be run again.

        Raises:
            EngineError: ONNX Runtime failed. An exception of a Function arrives as it is.
        """
        ...
