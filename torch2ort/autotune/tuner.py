"""Decides which library computes the operators of a half, by measurement on this machine, now or earlier."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import cast

import torch

from torch2ort._torch.aot import FakeTensorMode
from torch2ort._torch.dispatch import OpOverload
from torch2ort.autotune.alternatives import ALTERNATIVES, Alternative, Rewriting
from torch2ort.autotune.channels_last import compute_channels_last, image_results, region, set_channels_last
from torch2ort.autotune.hardware_key import machine
from torch2ort.autotune.microbenchmark import (
    AGAIN,
    LAID,
    RULE,
    MeasuredProgram,
    Timer,
    TooLongError,
    Way,
    layouts,
    timer,
    ways,
)
from torch2ort.cache.key.key import Key
from torch2ort.cache.store.graph_entries import EntryContent, store_entry
from torch2ort.cache.store.store import Store
from torch2ort.differentiate.op_signature import LARGE, alone, description, elements, is_fixed, words
from torch2ort.differentiate.split import Half
from torch2ort.log import logger
from torch2ort.options import Options
from torch2ort.program.target import Target

_KIND = "autotune"
# Of the rule's time, what an alternative may take at most.
_WINS = 0.95
# Seconds of processor time that a build may spend on measuring.
BUDGET = 10.0


@dataclass
class _Known:
    """The times that this process measured or read: seconds by way, by the digest of their key."""

    seconds: dict[str, Mapping[str, float]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def first(self, digest: str, seconds: Mapping[str, float]) -> Mapping[str, float]:
        """Return the times that were noted first for a key; these, which are noted, if there are none."""
        with self.lock:
            return self.seconds.setdefault(digest, seconds)


_KNOWN = _Known()


class Tuner:
    """Decisions for the halves of one build.

    Args:
        target: the target of the exported graph.
        options: the module's options.
        store: stores the measured times, see :func:`torch2ort.autotune.calibration.calibration_store`;
            ``None`` keeps them for this process only.
        table: the alternatives by operator; ``None`` for all.
        time_of: the timer of ways to compute the same; ``None`` for a clock.
        budget: returns the seconds that may be spent on measuring in all; ``None`` for :data:`BUDGET`.
        level: the level of the log's messages.
        clock: returns the seconds that were spent.
    """

    def __init__(
        self,
        target: Target,
        options: Options,
        store: Store | None,
        *,
        table: Mapping[OpOverload, Sequence[Alternative]] | None = None,
        time_of: Timer | None = None,
        budget: Callable[[], float] | None = None,
        level: int = logging.INFO,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._target, self._options, self._store = target, options, store
        self._table = ALTERNATIVES if table is None else table
        self._time_of = time_of or timer(options)
        self._budget, self._used, self._clock = budget or (lambda: BUDGET), 0.0, clock
        self._machine, self._level = machine(options), level

    def tune(self, rewriting: Rewriting, level: int | None = None) -> None:
        """Make operators run in the way that was measured to be faster than the rule's.

        Args:
            rewriting: the rewriting of a half's graph, functional, with images in their memory layout.
            level: the level of the log's messages; ``None`` for the tuner's.
        """
        level = self._level if level is None else level
        groups: dict[str, list[torch.fx.Node]] = {}
        for node in rewriting.graph.nodes:
            if self._is_measured(node):
                groups.setdefault(description(node), []).append(node)
        # The groups that take the most time go first, as the time may not suffice.
        order = sorted(groups, key=lambda text: -len(groups[text]) * elements(groups[text][0]))
        counts = Counter(self._decide(rewriting, text, groups[text], level) for text in order)
        told = ", ".join(f"{count} {how}" for how, count in counts.items())
        logger.log(level, "autotune: of %d operators, %s.", len(order), told or "none")
        rewriting.graph.lint()

    def choose_layout(self, graph: torch.fx.Graph) -> None:
        """Make images channels-last, if convolutions and the operators between them are faster so together.

        Args:
            graph: the joint graph, functional; the strides of its values are changed.
        """
        found = region(graph)
        if found is None:
            return
        standing, text = found
        seconds = self._seconds(
            "operators of images", text, lambda most: self._layouts(graph, standing, most)
        )
        if seconds is None or winner(seconds) == RULE:
            return
        set_channels_last(graph)
        logger.info(
            "autotune: %d operators of images run channels-last, in %.2f of the time by the rule "
            "(%.0f microseconds).",
            *(len(image_results(graph)), seconds[LAID] / seconds[RULE], seconds[RULE] * 1e6),
        )

    def _layouts(self, graph: torch.fx.Graph, standing: Half, most: float) -> dict[str, Way]:
        """Return the ways to compute the operators of images in a graph."""
        other, _ = cast("tuple[Half, str]", region(graph))
        set_channels_last(other.graph_module.graph)
        by_rule, laid_out = map(self._measured_program, (standing, other))
        return layouts(by_rule, laid_out, standing, self._options, most)

    def _measured_program(self, half: Half) -> MeasuredProgram:
        """Translate a half, with its operators as they are measured."""
        rewriting = Rewriting(half.graph_module.graph)
        compute_channels_last(rewriting, half.graph_module.graph)
        self.tune(rewriting, logging.DEBUG)
        return MeasuredProgram.of(half, rewriting, self._target)

    def _is_measured(self, node: torch.fx.Node) -> bool:
        return node.target in self._table and is_fixed(node) and elements(node) >= LARGE

    def _decide(self, rewriting: Rewriting, text: str, nodes: Sequence[torch.fx.Node], level: int) -> str:
        """Rewrite equal operators, or leave them to the rule; return which."""
        node, alternatives = nodes[0], self._table[cast(OpOverload, nodes[0].target)]
        seconds = self._seconds(
            str(node.target),
            text,
            lambda most: ways(node, alternatives, self._target, self._options, most),
        )
        if seconds is None:
            return "not measured, as the time was up"
        chosen = winner(seconds)
        alternative = next((a for a in alternatives if a.name == chosen), None)
        if alternative is None:
            return "by the rule"
        share = seconds[alternative.name] / seconds[RULE]
        logger.log(
            level,
            "autotune: %d of %s: %s, in %.2f of the time by the rule (%.0f microseconds).",
            *(len(nodes), words(node), alternative.words, share, seconds[RULE] * 1e6),
        )
        for one in nodes:
            alternative.rewrite(rewriting, one)
        return alternative.words

    def _seconds(
        self, what: str, text: str, make: Callable[[float], Mapping[str, Way]]
    ) -> Mapping[str, float] | None:
        """Return the seconds that each way takes; ``None`` if unknown, with no time to measure them.

        Args:
            what: the thing that is measured, for messages.
            text: identifies it.
            make: returns the ways, if the given seconds suffice for them.
        """
        key = Key.of(what, {**self._machine, "measured": text})
        # Not locked during the measurement, which waits for exports of other threads.
        seconds = _KNOWN.seconds.get(key.digest) or self._stored_seconds(key)
        if seconds is None and self._budget() > self._used:
            # If another process measured the same now, its work would be noise in this one's times.
            with nullcontext(True) if self._store is None else self._store.lock(key.digest, 0) as is_mine:
                seconds = self._stored_seconds(key) or (self._measure(make) if is_mine else None)
                if seconds is not None and self._store is not None:
                    store_entry(self._store, key, _KIND, EntryContent({"seconds": dict(seconds)}, {}))
        return None if seconds is None else _KNOWN.first(key.digest, seconds)

    def _measure(self, make: Callable[[float], Mapping[str, Way]]) -> Mapping[str, float] | None:
        _import_translations(self._target)
        start, used = self._clock(), self._used
        try:
            found = make(self._budget() - used)
        except TooLongError:
            found = {}
        except Exception as error:  # a kernel may refuse random numbers
            logger.debug("autotune: what runs by the rule is not measured: %s", error)
            found = {}
        seconds = self._time_of(found) if found else None
        # Measurements that were made inside of it are counted once.
        self._used = used + (self._clock() - start)
        return seconds

    def _stored_seconds(self, key: Key) -> Mapping[str, float] | None:
        entry = None if self._store is None else self._store.read(key.digest)
        return None if entry is None else dict(entry.manifest.data["seconds"])


@functools.cache
def _import_translations(target: Target) -> None:
    """Translate an operator, so the imports of the first translation do not count as measured time."""
    graph = torch.fx.Graph()
    given = graph.placeholder("given")
    given.meta["val"] = FakeTensorMode().from_tensor(torch.ones(1))
    made = graph.call_function(torch.ops.aten.add.Tensor, (given, 1))
    made.meta["val"] = given.meta["val"] + 1
    half, _ = alone(made)
    MeasuredProgram.of(half, Rewriting(half.graph_module.graph), target)


def winner(seconds: Mapping[str, float]) -> str:
    """Return the way to choose: another than the rule's only where it wins clearly.

    Args:
        seconds: the time of each way; the rule's was measured twice, and the difference is noise.
    """
    both = seconds[RULE], seconds[AGAIN]
    others = {name: s for name, s in seconds.items() if name not in (RULE, AGAIN)}
    best = min(others, key=others.__getitem__, default=RULE)
    wins = seconds[best] < _WINS * min(both) and min(both) - seconds[best] > abs(both[0] - both[1])
    return best if wins else RULE
