"""Timing that two or more ways of doing the same thing share, so that only their ratio is left."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping

# A model that was built once is built again by the next benchmark, and nothing goes into the user's cache.
os.environ.setdefault("TORCH2ORT_CACHE_DIR", "")


def interleaved_medians(
    ways: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    calls: int = 1,
    warm_up: int = 3,
    pause: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Time each of `ways` in turn, round after round, so that a busy moment of the machine hits them all.

    Args:
        ways: What to time, by name.
        rounds: Timings taken of each.
        calls: Calls in one timing.
        warm_up: Calls of each before the first timing; builds and caches happen there.
        pause: Seconds before each timing, for the threads of the way before to stop waiting for more work.
        clock: Tells the seconds; `time.thread_time` leaves out what other processes take of a full machine,
            where all of a way's work is done by this thread.

    Returns:
        Median seconds per call, by name.
    """
    for way in ways.values():
        for _ in range(warm_up):
            way()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            time.sleep(pause)
            start = clock()
            for _ in range(calls):
                way()
            seconds[name].append((clock() - start) / calls)
    return {name: statistics.median(values) for name, values in seconds.items()}
