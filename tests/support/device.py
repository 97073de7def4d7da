"""The device that tests run over: the CPU, a GPU, or an emulated one.

The emulated one is the CPU, run by the engines that run a GPU: bound outputs, copies for the caller, streams
of which the order is noted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from torch2ort.runtime.cuda import streams
from torch2ort.runtime.cuda.streams import SessionStream
from torch2ort.training import ort_targets

# What --device says; set before any test is collected.
asked: str = "cpu"

Waits = list[tuple[str, str]]


class NotedStream:
    """A stream that notes which others it waits for.

    Args:
        name: in the notes.
        waits: the notes: pairs of who waits and for whom, and who becomes the current one.
    """

    cuda_stream = 0x5EED

    def __init__(self, name: str, waits: Waits) -> None:
        self.name, self._waits = name, waits

    def wait_stream(self, other: NotedStream) -> None:
        """Note it."""
        self._waits.append((self.name, other.name))


class Streams:
    """PyTorch's streams on a machine without CUDA.

    Attributes:
        waits: what happened, in order.
        own: the stream of the sessions.
    """

    def __init__(self) -> None:
        self.waits: Waits = []
        self._current = [NotedStream("default", self.waits)]
        self.own = SessionStream(torch.device("cpu"), NotedStream("sessions", self.waits))  # type: ignore[arg-type]

    @contextlib.contextmanager
    def stream(self, stream: NotedStream) -> Iterator[None]:
        """As ``torch.cuda.stream``."""
        self.waits.append((stream.name, "enter"))
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()
            self.waits.append((stream.name, "exit"))

    def current_stream(self, device: object = None) -> NotedStream:
        """As ``torch.cuda.current_stream``."""
        return self._current[-1]

    def other(self, name: str) -> NotedStream:
        """One more stream of PyTorch's."""
        return NotedStream(name, self.waits)


def emulate_streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Put noted streams in the place of CUDA's."""
    made = Streams()
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", made.current_stream)
    monkeypatch.setattr(streams, "stream_of", lambda device: made.own)
    return made


def emulate(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Have the engines of a GPU run what is on the CPU."""
    monkeypatch.setattr(ort_targets, "device_of", lambda providers: torch.device("cuda", 0))
    return emulate_streams(monkeypatch)
