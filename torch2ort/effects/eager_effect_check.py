"""Runs of the model in eager PyTorch that find repeated changes of its state, and the lines of these."""

from __future__ import annotations

import linecache
import random
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch

from torch2ort import io_schema
from torch2ort.cache.key.write_only_state import WriteOnlyState
from torch2ort.effects.reachable_state import ReachableState, repr_of
from torch2ort.effects.side_effects import ItemsWritten, KeysWritten, Write
from torch2ort.effects.state_diff import REQUIRES_GRAD, SETTINGS, EffectError, added, settings, switch_back
from torch2ort.errors import SchemaError
from torch2ort.pythonop.abstract_run.object_rollback import Generators
from torch2ort.pythonop.abstract_run.object_snapshot import Holder
from torch2ort.support.source_lines import is_users

Run = Callable[[], Any]


def verify_effects_in_eager(
    model: torch.nn.Module, writes: Sequence[Write], unread: WriteOnlyState, run: Run
) -> tuple[Write, ...]:
    """Run forward twice, and compare its effects.

    Args:
        model: the model.
        writes: the effects of a run of its graph.
        unread: the places that forward writes before it reads them.
        run: runs forward in eager PyTorch.

    Returns:
        The effects that occur in eager PyTorch, too, and not only in a trace.

    Raises:
        EffectError: the effects differ each time, so each call would need a graph of its own.
    """
    reached, generators = ReachableState(model), Generators()
    contents = [[write.holder.read() for write in writes]]
    try:
        for _ in range(2):
            run()
            contents.append([write.holder.read() for write in writes])
    except Exception:
        # The caller's own call raises it, too.
        return tuple(writes)
    finally:
        _restore(reached)
        generators.restore()
    kept: list[Write] = []
    for write, *held in zip(writes, *contents, strict=True):
        if not _settles(write, unread, held):
            raise _changes_again(write, held)
        if not write.holder.same_as(held[0], held[1]):
            kept.append(write)
    return tuple(kept)


def _settles(write: Write, unread: WriteOnlyState, held: list[Any]) -> bool:
    before, first, second = held
    if isinstance(write, KeysWritten):
        skipped = unread.of(write.owner)
        fed = isinstance(write.holder.value, torch.nn.Module) or write.holder.path.endswith("._buffers")
        return all(
            _alike(first.get(key), second.get(key), unread=key in skipped, fed=fed) for key in write.sets
        )
    if isinstance(write, ItemsWritten):
        if id(write.owner) not in unread.containers:
            return len(first) == len(second) and all(map(_is, first, second))
        if write.whole:
            return _alike(first, second, unread=True, fed=False)
        news = []
        for earlier, later in ((before, first), (first, second)):
            news.append(_added_to(write.holder, earlier, later))
        return _alike(*news, unread=True, fed=False)
    return bool(first == second)


def _added_to(holder: Any, before: list[Any], contents: list[Any]) -> list[Any]:
    kept, holder.before = holder.before, before
    try:
        return added(holder, contents)[0]
    finally:
        holder.before = kept


def _alike(first: Any, second: Any, *, unread: bool, fed: bool) -> bool:
    """Return True if a graph that leaves ``first`` may leave ``second`` in later calls."""
    if first is second:
        return True
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        # Another size leads to another graph.
        return unread or (fed and first.shape == second.shape)
    if not unread and not isinstance(first, (bool, int, float, str, bytes, complex, torch.Size)):
        return False
    try:
        return io_schema.flatten(first)[1] == io_schema.flatten(second)[1]
    except SchemaError:
        return type(first) is type(second) and isinstance(first, torch.Size) and first == second


def _is(one: Any, other: Any) -> bool:
    return one is other


def _changes_again(write: Write, held: list[Any]) -> EffectError:
    _, first, second = held
    values = ""
    if isinstance(write, KeysWritten):
        for key in write.sets:
            one, other = first.get(key), second.get(key)
            if one is not other and isinstance(one, (bool, int, float, str)):
                values = f", from {one!r} to {other!r}"
                break
    return EffectError(
        f"changes {write.place} with each call{values}",
        "and a graph holds what one call found. Make it a buffer, a tensor that forward writes to, or change "
        "it outside of forward",
        write.holder.key,
    )


def _restore(reached: ReachableState) -> None:
    for holder, _ in reached.changes():
        if type(holder).__name__ != "_Memo":
            holder.write(holder.before)


def line_of(model: torch.nn.Module, key: tuple[int, str] | None, run: Run) -> str:
    """Return the line of the model's code in which a place changes; empty if it is not found.

    Args:
        model: the model.
        key: key of the place.
        run: runs forward in eager PyTorch.
    """
    if key is None:
        return ""
    reached, generators = ReachableState(model), Generators()
    holder = next((h for h in reached.holders if h.key == key), None)
    flags, switches = [(p, p.requires_grad) for p in model.parameters()], settings()
    finder = _Finder(_changed(model, holder, key))
    before = sys.gettrace()
    sys.settrace(finder.trace)
    try:
        run()
    except Exception:
        pass
    finally:
        sys.settrace(before)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        switch_back(switches)
        _restore(reached)
        generators.restore()
    return finder.line()


def _changed(model: torch.nn.Module, holder: Holder[Any] | None, key: tuple[int, str]) -> Callable[[], bool]:
    if key[1] == SETTINGS:
        before = settings()
        return lambda: settings() != before
    if key[1] == REQUIRES_GRAD:
        flags = [p.requires_grad for p in model.parameters()]
        return lambda: [p.requires_grad for p in model.parameters()] != flags
    if holder is not None:
        known: Holder[Any] = holder
        return lambda: not known.same(known.read())
    if "numpy" in key[1]:
        legacy = np.random.get_state(legacy=False)
        return lambda: repr_of(np.random.get_state(legacy=False)) != repr_of(legacy)
    state = random.getstate()
    return lambda: random.getstate() != state


class _Finder:
    """Trace function that follows a run line by line until something has changed."""

    def __init__(self, changed: Callable[[], bool]) -> None:
        self._changed = changed
        self._last: tuple[str, int, str] | None = None
        self._found = False

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Handle an event of ``sys.settrace``."""
        if self._found or not is_users(frame.f_code.co_filename):
            return None
        if self._last is not None and self._changed():
            self._found = True
            return None
        here: FrameType | None = frame
        if event == "return":
            # The caller's line is responsible for the next change.
            here = frame.f_back
            while here is not None and not is_users(here.f_code.co_filename):
                here = here.f_back
        if here is not None:
            self._last = here.f_code.co_filename, here.f_lineno, here.f_code.co_name
        return self.trace

    def line(self) -> str:
        """Return ``file:line in function (text)``."""
        if self._last is None:
            return ""
        file, number, name = self._last
        return f"{file}:{number} in {name} ({linecache.getline(file, number).strip()})"
