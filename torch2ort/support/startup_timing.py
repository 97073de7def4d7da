"""The duration of a model's start by phase: always measured, logged at the end.

A phase that runs inside of another one interrupts it, so the seconds of all phases add up to the total.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import ParamSpec, TypeVar

from torch2ort.log import is_shown, logger
from torch2ort.support.progress import shown

LOOK_UP = "cache look-up"
IMPORTS = "imports"
TRACE = "trace"
TRANSLATE = "translate"
SHAPES = "shapes"
DIFFERENTIATE = "differentiate"
SESSION = "session"
FIRST_RUN = "first run"

PHASES = (LOOK_UP, IMPORTS, TRACE, TRANSLATE, SHAPES, DIFFERENTIATE, SESSION, FIRST_RUN)
# The phases of an export, whatever runs the graph.
EXPORT = (LOOK_UP, IMPORTS, TRACE, TRANSLATE, SHAPES)

# A start-up of fewer seconds is not logged.
_NOTHING = 1e-3

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Recording:
    """The phases of one stretch of work in one thread.

    Args:
        owner: the start-up that it is a part of.
    """

    def __init__(self, owner: Startup) -> None:
        self.owner = owner
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = time.perf_counter()
        self.began = self._since

    @property
    def phase(self) -> str:
        """The running phase; empty if none runs."""
        return self._open[-1] if self._open else ""

    def enter(self, phase: str) -> None:
        """Begin a phase; the enclosing one is interrupted."""
        self._charge()
        self._open.append(phase)

    def leave(self) -> None:
        """End the running phase."""
        self._charge()
        self._open.pop()

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now


class _Here(threading.local):
    recording: Recording | None = None


_here = _Here()


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Add the time of the block to a phase of the start-up that this thread works on, if any.

    Args:
        name: one of :data:`PHASES`.
    """
    recording = _here.recording
    if recording is None:
        yield
        return
    recording.enter(name)
    try:
        yield
    finally:
        recording.leave()


def current() -> Startup | None:
    """Return the start-up that this thread works on; ``None`` if it works on none."""
    return None if _here.recording is None else _here.recording.owner


def spent() -> float:
    """Return the seconds so far of the start-up that this thread works on; 0.0 if it works on none."""
    recording = _here.recording
    if recording is None:
        return 0.0
    return sum(recording.owner.seconds.values()) + time.perf_counter() - recording.began


def timed(name: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a function whose whole work is one phase."""
    return phase(name)


class Startup:
    """The duration of a model's start so far.

    Args:
        name: of the model.

    Attributes:
        seconds: by phase, in the order of :data:`PHASES`; empty before the first phase.
        awaits_other_half: whether an engine will build its other half on request. The sum is then logged
            after that, or at the next call.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._logged: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.awaits_other_half = False

    @contextlib.contextmanager
    def recording(self, name: str) -> Iterator[None]:
        """Add the time of the block; inside of another such block of this thread it is a phase of that one.

        Args:
            name: the phase of the time that belongs to no other phase.
        """
        outer = _here.recording
        if outer is not None and outer.owner is self:
            with phase(name):
                yield
            return
        recording = _here.recording = Recording(self)
        recording.enter(name)
        try:
            with shown(self._name, lambda: (recording.phase, time.perf_counter() - recording.began)):
                yield
        finally:
            recording.leave()
            _here.recording = outer
            with self._lock:
                before = self.seconds
                self.seconds = {p: before.get(p, 0.0) + recording.seconds.get(p, 0.0) for p in PHASES}

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere.

        Args:
            name: the phase.
            seconds: of it.
        """
        with self._lock:
            before = {**self.seconds, name: self.seconds.get(name, 0.0) + seconds}
            self.seconds = {p: before.get(p, 0.0) for p in PHASES}

    def log(self, level: int = logging.WARNING) -> None:
        """Log the time that was added since the last call: one line, and a table at INFO.

        Args:
            level: the level of the line.
        """
        with self._lock:
            what = "another graph was ready" if self._logged else "ready"
            added = {p: s - self._logged.get(p, 0.0) for p, s in self.seconds.items()}
            self._logged, self.awaits_other_half = self.seconds, False
        export = sum(added[p] for p in EXPORT)
        total = sum(added.values())
        if total < _NOTHING:
            return
        logger.log(level, "%s: %s after %.2f s (export %.2f s)", self._name, what, total, export)
        if is_shown(logging.INFO):
            logger.info("start-up of %s\n%s", self._name, table(added))


def table(seconds: Mapping[str, float]) -> str:
    """Return a line per phase, with seconds and share."""
    total = sum(seconds.values()) or 1.0
    lines = [f"  {'phase':<14} {'seconds':>9} {'share':>7}"]
    lines += [f"  {p:<14} {s:>9.3f} {100 * s / total:>5.0f} %" for p, s in seconds.items()]
    return "\n".join([*lines, f"  {'total':<14} {sum(seconds.values()):>9.3f}"])
