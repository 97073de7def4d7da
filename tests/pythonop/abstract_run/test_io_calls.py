"""Input and output by a Function's code is detected, and that of other code is not."""

from __future__ import annotations

import gc
from pathlib import Path

from torch2ort.pythonop.abstract_run.io_calls import in_front_of_calls_outside


class Closes:
    """Writes to a file when it is collected as part of an unreachable cycle."""

    def __init__(self, path: Path) -> None:
        self.itself, self.path = self, path

    def __del__(self) -> None:
        self.path.write_text("closed")


def test_a_finalizer_of_other_code_runs_to_its_end(tmp_path):
    def end(called: str) -> None:
        raise KeyboardInterrupt(called)

    gc.collect()
    Closes(tmp_path / "file")
    with in_front_of_calls_outside(end):
        # More objects than the garbage collector's threshold.
        kept = [[] for _ in range(5 * gc.get_threshold()[0])]
    del kept
    gc.collect()
    assert (tmp_path / "file").read_text() == "closed"


def test_the_garbage_collector_is_as_it_was():
    for collects in (False, True):
        (gc.enable if collects else gc.disable)()
        with in_front_of_calls_outside(print):
            pass
        assert gc.isenabled() == collects
