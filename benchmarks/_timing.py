"""Timing of alternatives under the same conditions, for ratios between them."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping

# Without a cache every benchmark builds its models itself, and the user's cache stays as it is.
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
    """Time each of `ways` in turn, round after round, so that a busy moment of the machine affects them all.

    Args:
        ways: Functions to time, by name.
        rounds: Timings of each function.
        calls: Calls in one timing.
        warm_up: Calls of each before the first timing, which build engines and fill caches.
        pause: Seconds before each timing, in which threads of the previous function stop spinning.
        clock: Returns seconds; `time.thread_time` excludes other processes on a busy machine, and is valid if
            this thread does all the work.

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
