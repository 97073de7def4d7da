"""The profile of an ORTModule's steps: by operator, by Function and by line of the model's source."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from torch2ort.errors import EngineError, OptionError
from torch2ort.runtime.profiling import Event, Tracer

_ROWS = 12


@dataclass(frozen=True)
class Row:
    """The nodes of one operator, Function or line in a profile.

    Attributes:
        name: an operator, a Function, or ``file.py:12``.
        calls: number of runs of these nodes, in all steps.
        seconds: duration of these runs, in all steps.
        share: fraction of the seconds of all nodes.
        peak_bytes: the largest size of the live values computed by the session's nodes, while one of these
            nodes ran.
    """

    name: str
    calls: int
    seconds: float
    share: float
    peak_bytes: int


class Profile:
    """A profile of the next steps of an :class:`ORTModule`; see :meth:`ORTModule.profile`.

    It ends when its results are read, or with the block where it is a context manager.

    Attributes:
        steps: number of calls to profile.
        seen: number of calls profiled so far.
    """

    def __init__(self, steps: int) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise OptionError(f"profile: steps is {steps!r}; allowed is an integer of at least 1.")
        self.steps = steps
        self.seen = 0
        self.tracer = Tracer()
        self._events: list[Event] | None = None

    @property
    def wants_more(self) -> bool:
        """True if the next call is profiled."""
        return self._events is None and self.seen < self.steps

    def finish(self) -> None:
        """End the profile, and read the sessions' traces; further calls do nothing."""
        if self._events is None:
            self._events = self.tracer.take()

    @property
    def events(self) -> tuple[Event, ...]:
        """One event per run of a node, in the order of their start times.

        Raises:
            EngineError: the module was not called.
        """
        if not self.seen:
            raise EngineError(
                "profile: the module was not called since; call profile(steps), then run the steps, then ask"
            )
        self.finish()
        return tuple(self._events or ())

    @property
    def operators(self) -> tuple[Row, ...]:
        """One row per operator type, the longest time first."""
        return self._rows(lambda event: event.operator)

    @property
    def functions(self) -> tuple[Row, ...]:
        """One row per Function, forward and backward; consecutive Functions may share a row."""
        return self._rows(lambda event: event.function)

    @property
    def lines(self) -> tuple[Row, ...]:
        """One row per line of the model's source, forward and backward."""
        return self._rows(lambda event: event.origin.line or "(no line)")

    def _rows(self, name_of: Callable[[Event], str]) -> tuple[Row, ...]:
        groups: dict[str, list[Event]] = {}
        for event in self.events:
            groups.setdefault(name_of(event), []).append(event)
        groups.pop("", None)
        whole = sum(event.duration for event in self.events) or 1.0
        rows = [
            Row(
                name,
                len(found),
                sum(e.duration for e in found) / 1e6,
                sum(e.duration for e in found) / whole,
                max(e.memory for e in found),
            )
            for name, found in groups.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.seconds))

    def table(self, rows: int = _ROWS) -> str:
        """Return the three tables as text.

        Args:
            rows: the maximum number of rows of each.
        """
        total = sum(event.duration for event in self.events) / 1e6
        parts = [f"{self.seen} steps, {total:.4f} s in {len(self.events)} runs of nodes"]
        for title, found in (
            ("operator", self.operators),
            ("Function", self.functions),
            ("line", self.lines),
        ):
            parts += _table(title, found, rows)
        return "\n".join(parts)

    def __str__(self) -> str:
        return self.table()

    def to_json(self) -> str:
        """Return the tables as JSON: ``steps``, and rows under ``operators``, ``functions`` and ``lines``."""
        tables = {"operators": self.operators, "functions": self.functions, "lines": self.lines}
        rows = {title: [asdict(row) for row in found] for title, found in tables.items()}
        return json.dumps({"steps": self.seen, **rows}, indent=1)

    def chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the runs of nodes for ``chrome://tracing`` or Perfetto.

        Args:
            path: the JSON file.
        """
        first = min((event.begin for event in self.events), default=0.0)
        events: list[dict[str, Any]] = []
        for event in self.events:
            common = {"ts": event.begin - first, "pid": os.getpid(), "tid": event.thread}
            arguments = {
                "node": event.name,
                "module": event.origin.module,
                "line": event.origin.line,
                "function": event.function,
            }
            name = event.function.rpartition(".")[2] or event.operator
            events.append({**common, "ph": "X", "name": name, "dur": event.duration, "args": arguments})
            events.append({**common, "ph": "C", "name": "memory", "args": {"bytes": event.memory}})
        Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()


def _table(title: str, rows: Sequence[Row], most: int) -> list[str]:
    lines = ["", f"{title:<60} {'calls':>6} {'ms':>10} {'share':>6} {'peak':>10}"]
    for row in rows[:most]:
        name = row.name if len(row.name) <= 60 else f"…{row.name[-59:]}"
        lines.append(
            f"{name:<60} {row.calls:>6} {1000 * row.seconds:>10.3f} {100 * row.share:>4.0f} % "
            f"{_bytes(row.peak_bytes):>10}"
        )
    if len(rows) > most:
        lines.append(f"… and {len(rows) - most} more")
    return lines


def _bytes(count: int) -> str:
    for unit, least in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= least:
            return f"{count / least:.1f} {unit}"
    return f"{count} B"
