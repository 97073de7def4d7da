"""Sessions on a GPU run on one stream, in order with PyTorch's; here streams only record their waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.device import Streams, emulate_streams
from torch2ort.runtime.cuda.streams import SessionStream, stream_of

RUN = [("sessions", "default"), ("sessions", "enter"), ("sessions", "exit"), ("default", "sessions")]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return emulate_streams(monkeypatch)


def test_a_run_is_behind_what_came_before_and_before_what_follows(streams: Streams) -> None:
    with streams.own.make_current():
        pass
    assert streams.waits == RUN


def test_a_run_that_fails_is_before_what_follows_too(streams: Streams) -> None:
    with pytest.raises(ValueError, match="mine"), streams.own.make_current():
        raise ValueError("mine")
    assert streams.waits == RUN


def test_a_run_waits_for_each_stream_that_runs_were_called_from(streams: Streams) -> None:
    with torch.cuda.stream(streams.other("side")), streams.own.make_current():
        pass
    streams.waits.clear()
    with streams.own.make_current():
        pass
    assert [pair for pair in streams.waits if pair[0] == "sessions"][:2] == [
        ("sessions", "side"),
        ("sessions", "default"),
    ]


def test_a_run_inside_of_a_run_is_in_order(streams: Streams) -> None:
    with streams.own.make_current():
        streams.waits.clear()
        with streams.own.make_current():
            pass
    assert ("sessions", "sessions") in streams.waits


def test_results_are_copied_on_the_callers_stream_before_their_memory_is_used_again(streams: Streams) -> None:
    given = torch.ones(3)
    made, nothing = streams.own.handed_over([given, None])
    assert nothing is None
    assert made is not None
    assert torch.equal(made, given)
    assert made.data_ptr() != given.data_ptr()
    assert streams.waits == [("sessions", "default")]


def test_all_sessions_of_a_device_have_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def __init__(self, device: Any) -> None:
            self.cuda_stream = 17 + device.index

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    stream_of.cache_clear()
    first = stream_of(torch.device("cuda", 0))
    assert isinstance(first, SessionStream)
    assert first is stream_of(torch.device("cuda", 0))
    assert first.address == 17
    assert stream_of(torch.device("cuda", 1)).address == 18
    stream_of.cache_clear()
