"""The device that tests run on: the CPU, a GPU, or an emulated one.

The emulated one is the CPU, driven by the engines for a GPU: bound outputs, copies for the caller, streams
whose order is recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from torch2ort.runtime.cuda import streams
from torch2ort.runtime.cuda.streams import SessionStream
from torch2ort.training import ort_targets

# The value of --device; set before any test is collected.
asked: str = "cpu"

Waits = list[tuple[str, str]]


class NotedStream:
    """A stream that records the streams that it waits for.

    Args:
        name: name in the record.
        waits: the record: pairs of a waiting stream and the one it waits for, and changes of the current one.
    """

    cuda_stream = 0x5EED

    def __init__(self, name: str, waits: Waits) -> None:
        self.name, self._waits = name, waits

    def wait_stream(self, other: NotedStream) -> None:
        """Record the wait."""
        self._waits.append((self.name, other.name))


class Streams:
    """PyTorch's streams on a machine without CUDA.

    Attributes:
        waits: the record, in order.
        own: the stream of the sessions.
    """

    def __init__(self) -> None:
        self.waits: Waits = []
        self._current = [NotedStream("default", self.waits)]
        self.own = SessionStream(torch.device("cpu"), NotedStream("sessions", self.waits))  # type: ignore[arg-type]

    @contextlib.contextmanager
    def stream(self, stream: NotedStream) -> Iterator[None]:
        """Substitute for ``torch.cuda.stream``."""
        self.waits.append((stream.name, "enter"))
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()
            self.waits.append((stream.name, "exit"))

    def current_stream(self, device: object = None) -> NotedStream:
        """Substitute for ``torch.cuda.current_stream``."""
        return self._current[-1]

    def other(self, name: str) -> NotedStream:
        """Make another stream of PyTorch's."""
        return NotedStream(name, self.waits)


def emulate_streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Replace CUDA's streams with recording ones."""
    made = Streams()
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", made.current_stream)
    monkeypatch.setattr(streams, "stream_of", lambda device: made.own)
    return made


def emulate(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Have the engines for a GPU run tensors on the CPU."""
    monkeypatch.setattr(ort_targets, "device_of", lambda providers: torch.device("cuda", 0))
    return emulate_streams(monkeypatch)
