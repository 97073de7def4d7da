"""The cost of timing the phases of a start, as a share of a cached start.

The phases of a cached start are counted, and as many empty ones are timed.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import _models
import torch
from _machine import processor

import torch2ort
from torch2ort.support.startup_timing import TRACE, Recording, Startup, phase

ROUNDS = 5
EMPTY = 20_000


def counted_start(folder: str) -> tuple[int, float]:
    """Return the number of phases of a first step, and its seconds."""
    torch.manual_seed(1)
    model, batch = _models.bert(), _models.batch("BERT", 8)
    entered = 0
    enter = Recording.enter

    def counting(self: Recording, name: str) -> None:
        nonlocal entered
        entered += 1
        enter(self, name)

    Recording.enter = counting  # type: ignore[method-assign]
    begin = time.thread_time()
    module = torch2ort.ORTModule(model, options=torch2ort.Options(cache_dir=folder, log_level="error"))
    module(**batch).loss.backward()
    seconds = time.thread_time() - begin
    Recording.enter = enter  # type: ignore[method-assign]
    return entered, seconds


def empty_phase() -> float:
    """Return the seconds of a phase in which nothing is done."""
    with Startup("nothing").recording(TRACE):
        begin = time.thread_time()
        for _ in range(EMPTY):
            with phase(TRACE):
                pass
        return (time.thread_time() - begin) / EMPTY


def main() -> None:
    """Print one line."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        counted_start(folder)
        starts = [counted_start(folder) for _ in range(ROUNDS)]
    cost = statistics.median(empty_phase() for _ in range(ROUNDS))
    entered, seconds = (statistics.median(values) for values in zip(*starts, strict=True))
    print(
        f"timing the phases of a cached start (tiny BERT, {processor()}): {entered:.0f} phases of "
        f"{1e6 * cost:.2f} us are {100 * entered * cost / seconds:.4f} % of {seconds:.2f} s"
    )


if __name__ == "__main__":
    main()
