"""Decides who does the operators of a half: as was measured on this machine, now or in an earlier build."""

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
from torch2ort.autotune.channels_last import arrange, laid, lay, region
from torch2ort.autotune.hardware_key import machine
from torch2ort.autotune.microbenchmark import (
    AGAIN,
    LAID,
    RULE,
    Program,
    Timer,
    TooLongError,
    Way,
    layouts,
    timer,
    ways,
)
from torch2ort.cache.key.key import Key
from torch2ort.cache.store.graph_entries import Kept, keep
from torch2ort.cache.store.store import Store
from torch2ort.differentiate.op_signature import LARGE, alone, description, elements, is_fixed, words
from torch2ort.differentiate.split import Half
from torch2ort.log import logger
from torch2ort.options import Options
from torch2ort.program.target import Target

_KIND = "autotune"
# Of the rule's time, what an alternative may take at most.
_WINS = 0.95
# Seconds of processor time that a build may measure.
BUDGET = 10.0


@dataclass
class _Known:
    """What this process measured or read, by the digest of its key: seconds by way."""

    seconds: dict[str, Mapping[str, float]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def first(self, digest: str, seconds: Mapping[str, float]) -> Mapping[str, float]:
        """What was noted of the same before, else these, which are noted."""
        with self.lock:
            return self.seconds.setdefault(digest, seconds)


_KNOWN = _Known()


class Tuner:
    """Decides for the halves of one build.

    Args:
        target: what the exported graph is for.
        options: of the module.
        store: keeps what was measured, of :func:`torch2ort.autotune.calibration.calibration_store`; ``None``
            keeps it for this process alone.
        table: the alternatives by operator; ``None`` for all that there are.
        time_of: what times ways to compute the same; ``None`` for a clock.
        budget: gives the seconds that may be measured in all; ``None`` for :data:`BUDGET`.
        level: of what the log says.
        clock: tells the seconds that were spent.
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
        """Have operators run as was measured to be faster than by the rule.

        Args:
            rewriting: of the graph of a half, functional, whose images lie as they are computed.
            level: of what the log says; ``None`` for the tuner's.
        """
        level = self._level if level is None else level
        groups: dict[str, list[torch.fx.Node]] = {}
        for node in rewriting.graph.nodes:
            if self._is_measured(node):
                groups.setdefault(description(node), []).append(node)
        # What weighs most goes first, should the time not be enough.
        order = sorted(groups, key=lambda text: -len(groups[text]) * elements(groups[text][0]))
        counts = Counter(self._decide(rewriting, text, groups[text], level) for text in order)
        told = ", ".join(f"{count} {how}" for how, count in counts.items())
        logger.log(level, "autotune: of %d operators, %s.", len(order), told or "none")
        rewriting.graph.lint()

    def lay_out(self, graph: torch.fx.Graph) -> None:
        """Have images pass channels-last, if convolutions and what is between them are faster so together.

        Args:
            graph: joint, functional; the strides of its values are changed.
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
        lay(graph)
        logger.info(
            "autotune: %d operators of images run channels-last, in %.2f of the time by the rule "
            "(%.0f microseconds).",
            *(len(laid(graph)), seconds[LAID] / seconds[RULE], seconds[RULE] * 1e6),
        )

    def _layouts(self, graph: torch.fx.Graph, standing: Half, most: float) -> dict[str, Way]:
        """The ways to compute the operators of images in a graph."""
        other, _ = cast("tuple[Half, str]", region(graph))
        lay(other.graph_module.graph)
        by_rule, laid_out = map(self._tuned, (standing, other))
        return layouts(by_rule, laid_out, standing, self._options, most)

    def _tuned(self, half: Half) -> Program:
        """The program of a half, with its operators as they are measured."""
        rewriting = Rewriting(half.graph_module.graph)
        arrange(rewriting, half.graph_module.graph)
        self.tune(rewriting, logging.DEBUG)
        return Program.of(half, rewriting, self._target)

    def _is_measured(self, node: torch.fx.Node) -> bool:
        return node.target in self._table and is_fixed(node) and elements(node) >= LARGE

    def _decide(self, rewriting: Rewriting, text: str, nodes: Sequence[torch.fx.Node], level: int) -> str:
        """Rewrite equal operators, or leave them to the rule; returns which."""
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
        """What each way takes; ``None`` if that is not known, and there is no time to measure it.

        Args:
            what: is measured, for people.
            text: tells it from all else.
            make: gives the ways, if the seconds that there are suffice for them.
        """
        key = Key.of(what, {**self._machine, "measured": text})
        # Not locked while it is measured: that waits for exports of other threads.
        seconds = _KNOWN.seconds.get(key.digest) or self._kept(key)
        if seconds is None and self._budget() > self._used:
            # Where another process measures the same, its times would be this one's noise.
            with nullcontext(True) if self._store is None else self._store.lock(key.digest, 0) as is_mine:
                seconds = self._kept(key) or (self._measured(make) if is_mine else None)
                if seconds is not None and self._store is not None:
                    keep(self._store, key, _KIND, Kept({"seconds": dict(seconds)}, {}))
        return None if seconds is None else _KNOWN.first(key.digest, seconds)

    def _measured(self, make: Callable[[float], Mapping[str, Way]]) -> Mapping[str, float] | None:
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
        # What was measured for it inside is counted once.
        self._used = used + (self._clock() - start)
        return seconds

    def _kept(self, key: Key) -> Mapping[str, float] | None:
        entry = None if self._store is None else self._store.read(key.digest)
        return None if entry is None else dict(entry.manifest.data["seconds"])


@functools.cache
def _import_translations(target: Target) -> None:
    """Translate an operator, so that what is imported for the first does not count as measured time."""
    graph = torch.fx.Graph()
    given = graph.placeholder("given")
    given.meta["val"] = FakeTensorMode().from_tensor(torch.ones(1))
    made = graph.call_function(torch.ops.aten.add.Tensor, (given, 1))
    made.meta["val"] = given.meta["val"] + 1
    half, _ = alone(made)
    Program.of(half, Rewriting(half.graph_module.graph), target)


def winner(seconds: Mapping[str, float]) -> str:
    """The way to choose: another than the rule's only where it wins clearly.

    Args:
        seconds: of each way; the rule's was timed twice, and what lies between is noise.
    """
    both = seconds[RULE], seconds[AGAIN]
    others = {name: s for name, s in seconds.items() if name not in (RULE, AGAIN)}
    best = min(others, key=others.__getitem__, default=RULE)
    wins = seconds[best] < _WINS * min(both) and min(both) - seconds[best] > abs(both[0] - both[1])
    return best if wins else RULE
