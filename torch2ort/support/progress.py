"""A line on a terminal with the running phase of a long start-up; with rich it is updated in place."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from torch2ort.log import is_shown

# Seconds before the line is shown: shorter start-ups need none.
PATIENCE = 2.0
_REFRESH = 0.2
_DEBUGGERS = frozenset({"bdb", "pdb", "cmd", "code", "IPython.terminal.debugger", "pudb.debugger"})


@contextlib.contextmanager
def shown(name: str, now: Callable[[], tuple[str, float]]) -> Iterator[None]:
    """Show a progress line while the block runs, once it has taken :data:`PATIENCE` seconds.

    Args:
        name: of the model.
        now: returns the running phase, and the seconds since the beginning.
    """
    if not _can_show():
        yield
        return
    done = threading.Event()
    watched = threading.get_ident()
    thread = threading.Thread(
        target=_show, args=(name, now, done, watched), name="torch2ort-progress", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _can_show() -> bool:
    try:
        terminal = sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False
    return terminal and is_shown(logging.WARNING)


@functools.cache
def _has_rich() -> bool:
    """Return True if rich is installed; it is imported only when the line is shown."""
    return importlib.util.find_spec("rich") is not None


def _show(name: str, now: Callable[[], tuple[str, float]], done: threading.Event, watched: int) -> None:
    if not done.wait(PATIENCE):
        (_show_live if _has_rich() else _show_plainly)(name, now, done, watched)


def _show_plainly(
    name: str, now: Callable[[], tuple[str, float]], done: threading.Event, watched: int
) -> None:
    shown_phase = None
    while not done.is_set():
        phase, seconds = now()
        if phase != shown_phase and not _is_debugged(watched):
            print(_line(name, phase, seconds), file=sys.stderr, flush=True)
            shown_phase = phase
        # A written line cannot be erased, so short phases are not shown.
        done.wait(PATIENCE)


def _show_live(name: str, now: Callable[[], tuple[str, float]], done: threading.Event, watched: int) -> None:
    live_module, text_module = importlib.import_module("rich.live"), importlib.import_module("rich.text")
    console = importlib.import_module("rich.console").Console(stderr=True)
    while not done.is_set():
        if _is_debugged(watched):
            done.wait(_REFRESH)
            continue
        # Output of the model's code is not redirected.
        with live_module.Live(
            console=console,
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as live:
            while not done.is_set() and not _is_debugged(watched):
                phase, seconds = now()
                live.update(text_module.Text(_line(name, phase, seconds)), refresh=True)
                done.wait(_REFRESH)


def _line(name: str, phase: str, seconds: float) -> str:
    return f"torch2ort: {name}: {phase} ({seconds:.0f} s)"


def _is_debugged(thread: int) -> bool:
    """Return True if a thread is in a debugger: the line must not overwrite its prompt."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_globals.get("__name__") in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False
