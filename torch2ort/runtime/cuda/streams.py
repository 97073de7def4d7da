"""The stream that all sessions of one GPU run on, and its order with PyTorch's streams.

onnxruntime takes a stream for a session (``user_compute_stream``), but not CUDA's default one, whose address
is 0, and PyTorch's current stream is mostly that. So sessions have a stream of their own, and events say
which work comes before which. Nobody waits on the host.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch


class SessionStream:
    """The stream of the sessions on one GPU.

    Args:
        device: the GPU.
        stream: of PyTorch's, with an address.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device, self._stream = device, stream
        # PyTorch's streams that somebody called from. What a run made may be in use there still.
        self._callers: list[torch.cuda.Stream] = []

    @property
    def address(self) -> int:
        """What onnxruntime takes for the stream."""
        return int(self._stream.cuda_stream)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make it PyTorch's current stream: behind what was called for before, and before all that follows.

        What is freed inside, and what a Function leaves behind, belongs to this stream. Its memory is given
        out again inside of a later block, so that the block waits for each stream that it may be in use on.
        """
        caller = torch.cuda.current_stream(self._device)
        if caller not in self._callers:
            self._callers.append(caller)
        for known in tuple(self._callers):
            self._stream.wait_stream(known)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            caller.wait_stream(self._stream)

    def handed_over(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The tensors in memory that PyTorch allocates for its current stream, as eager's results are.

        Only of such memory PyTorch knows on which streams it is in use (``record_stream``). onnxruntime's
        own is free for its next run at once.

        Args:
            tensors: results of a run that was :meth:`entered`, to be called behind it.
        """
        made = [None if tensor is None else tensor.clone() for tensor in tensors]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return made


@functools.cache
def stream_of(device: torch.device) -> SessionStream:
    """The stream of all sessions on ``device``: one, so that what they hand to each other is in order."""
    return SessionStream(device, torch.cuda.Stream(device))
