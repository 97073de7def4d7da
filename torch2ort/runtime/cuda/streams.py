"""The stream that all sessions of one GPU run on, and its order with PyTorch's streams.

onnxruntime accepts a stream for a session (``user_compute_stream``), but not CUDA's default stream, whose
address is 0, and PyTorch's current stream is mostly that one. So sessions have a stream of their own, and
events define the order of its work and PyTorch's. The host does not wait.
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
        stream: a stream of PyTorch's, with an address.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device, self._stream = device, stream
        # PyTorch's streams of earlier callers. The results of a run may still be in use on them.
        self._callers: list[torch.cuda.Stream] = []

    @property
    def address(self) -> int:
        """The stream's address, as onnxruntime expects it."""
        return int(self._stream.cuda_stream)

    @contextlib.contextmanager
    def make_current(self) -> Iterator[None]:
        """Make it PyTorch's current stream. Its work is after earlier and before later work of the caller.

        Memory that is freed inside, and memory that a Function allocates, belongs to this stream. It is
        allocated again in a later block, so the block waits for each stream on which the memory may be in
        use.
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
        """Copy tensors into memory that PyTorch allocates for its current stream, as it does for its results.

        Only for such memory does PyTorch know the streams on which it is in use (``record_stream``). ONNX
        Runtime's own memory is free for its next run at once.

        Args:
            tensors: results of a run inside of :meth:`make_current`; call this after that block.
        """
        made = [None if tensor is None else tensor.clone() for tensor in tensors]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return made


@functools.cache
def stream_of(device: torch.device) -> SessionStream:
    """Return the stream of all sessions on ``device``: a single one, so their work is in order."""
    return SessionStream(device, torch.cuda.Stream(device))
