"""Timing of one operator of a half: a session for each way to compute it, over the same numbers."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx
import torch

from torch2ort.autotune.alternatives import Alternative, NotPossibleError, Rewriting
from torch2ort.differentiate.lower_step import lower_half
from torch2ort.differentiate.op_signature import alone
from torch2ort.differentiate.split import Half
from torch2ort.differentiate.step_target import half_of
from torch2ort.graph.lowered_graph import Lowered
from torch2ort.log import logger
from torch2ort.options import Options
from torch2ort.program.target import Target
from torch2ort.pythonop import Site
from torch2ort.pythonop.native import native
from torch2ort.runtime.step_io import Passing
from torch2ort.runtime.step_session import Bindings, HalfSession

aten = torch.ops.aten
_WARM_UP, _FEWEST, _ROUNDS = 1, 5, 24
# Seconds that the rounds of one operator may take together, and the shortest timing.
_MOST, _LEAST = 0.3, 2e-4
# The most copies of an operator's inputs, and the bytes of them that exceed every processor's caches: in a
# step memory is cold, and the library that is faster there may be slower with warm memory.
_COPIES, _COLD = 16, 1 << 26
# Runs in the fewest rounds: the rule's way twice, and one other.
_RUNS = 3 * (_WARM_UP + 1 + _FEWEST)
RULE, AGAIN, LAID = "rule", "rule again", "channels last"
# Two ways agree if they differ by rounding errors, including those of sums.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4

Way = Callable[[], Sequence[torch.Tensor]]
# From ways to compute the same result to the seconds that each takes.
Timer = Callable[[Mapping[str, Way]], Mapping[str, float]]

# For operators that read indices: the bound of these.
_BOUNDS: Mapping[Any, Callable[[torch.fx.Node], int]] = {
    aten.embedding.default: lambda node: int(node.args[0].meta["val"].shape[0]),  # type: ignore[union-attr]
}


class TooLongError(Exception):
    """One run takes too long to measure all ways in the available time."""


@dataclass(frozen=True)
class MeasuredProgram:
    """A part of a half in ONNX, for a measurement.

    Attributes:
        lowered: the translated program.
        sites: calls of PyTorch's kernels in it, which this object keeps alive.
    """

    lowered: Lowered
    sites: Sequence[Site]

    @classmethod
    def of(cls, half: Half, rewriting: Rewriting, target: Target) -> MeasuredProgram:
        """Translate a rewritten half.

        Raises:
            UnsupportedOperatorError: an operator cannot be part of a graph.
        """
        return cls(lower_half(half, half_of(target, rewriting.in_onnx)), rewriting.sites)

    @property
    def text(self) -> str:
        """A text that is equal for programs that compute the same."""

        def node_text(node: onnx.NodeProto) -> str:
            site = self.lowered.calls.get(node.name)
            return repr([node.op_type, list(map(str, node.attribute)) if site is None else site.arguments])

        return "".join(map(node_text, self.lowered.proto.graph.node))

    def way(self, given: Sequence[torch.Tensor], options: Options) -> Way:
        """Return a function that runs the program over some numbers."""
        size = sum(tensor.nbytes for tensor in given)
        copies = max(1, min(_COPIES, _COLD // max(size, 1)))
        sets = itertools.cycle([given, *([t.clone() for t in given] for _ in range(copies - 1))])
        passing = Passing.through(len(given), len(self.lowered.outputs))
        session = HalfSession(
            "trial", self.lowered, Bindings(options.providers), replace(options, save_onnx_dir=None), passing
        )
        run = native.Run()

        def way() -> list[torch.Tensor]:
            return session.run(None, next(sets), run)[0]

        return way


def ways(
    node: torch.fx.Node,
    alternatives: Sequence[Alternative],
    target: Target,
    options: Options,
    seconds: float = math.inf,
) -> dict[str, Way]:
    """Return ways to compute an operator, all on the same numbers.

    Args:
        node: the operator.
        alternatives: the alternatives to the rule.
        target: the target of the exported graph.
        options: the module's options.
        seconds: the time for the measurement.

    Returns:
        The rule's way; the same in another session, as :data:`AGAIN`, whose time shows the noise; and the
        alternatives that differ from the rule's way and agree with it.

    Raises:
        TooLongError: the time is too short.
    """
    half, operator = alone(node)
    given = _numbers(half, _BOUNDS[node.target](node) if node.target in _BOUNDS else 2)
    program = MeasuredProgram.of(half, Rewriting(half.graph_module.graph), target)
    found = _twice(program, given, options, seconds)
    expected = found[RULE]()
    for alternative in alternatives:
        half, operator = alone(node)
        rewriting = Rewriting(half.graph_module.graph)
        try:
            alternative.rewrite(rewriting, operator)
            other = MeasuredProgram.of(half, rewriting, target)
            if other.text == program.text:
                continue
            way = other.way(given, options)
            if _agree(way(), expected):
                found[alternative.name] = way
            else:
                logger.debug("autotune: %s %s differs from the rule's way", node.target, alternative.words)
        except NotPossibleError:
            continue
        except Exception as error:  # any error of onnxruntime; the alternative is optional
            logger.debug("autotune: %s does not run %s: %s", node.target, alternative.words, error)
    return found


def layouts(
    standing: MeasuredProgram, laid: MeasuredProgram, like: Half, options: Options, seconds: float = math.inf
) -> dict[str, Way]:
    """Return ways to compute a region of images.

    Args:
        standing: the region in the layout of the model, which is the rule's way.
        laid: the same region channels-last.
        like: a half with the region's inputs.
        options: the module's options.
        seconds: the time for the measurement.

    Raises:
        TooLongError: the time is too short.
    """
    given = _numbers(like, 2)
    return {**_twice(standing, given, options, seconds), LAID: laid.way(given, options)}


def _twice(
    program: MeasuredProgram, given: Sequence[Any], options: Options, seconds: float
) -> dict[str, Way]:
    """Return the rule's way in two sessions, whose times differ by some percent with their memory's place."""
    way = program.way(given, options)
    way()
    start = time.perf_counter()
    way()
    if (time.perf_counter() - start) * _RUNS > seconds:
        raise TooLongError
    return {RULE: way, AGAIN: program.way(given, options)}


def timer(options: Options, most: float = _MOST) -> Timer:
    """Return the timer of ways, which reads this thread's processor time where only this thread computes.

    Args:
        options: determines the number of threads.
        most: seconds that the rounds of one operator may take together.
    """
    is_alone = (options.intra_op_threads or torch.get_num_threads()) == 1
    clock = time.thread_time if is_alone else time.perf_counter

    def seconds(found: Mapping[str, Way]) -> dict[str, float]:
        return interleaved(found, clock, most)

    return seconds


def interleaved(
    found: Mapping[str, Way], clock: Callable[[], float], most: float = _MOST
) -> dict[str, float]:
    """Return the median of several timings of each way, measured in turns.

    Args:
        found: the ways.
        clock: returns seconds.
        most: seconds that the rounds may take together.
    """
    first: dict[str, float] = {}
    for name, way in found.items():
        for _ in range(_WARM_UP):
            way()
        start = clock()
        way()
        first[name] = max(clock() - start, 1e-7)
    calls = {name: max(1, round(_LEAST / seconds)) for name, seconds in first.items()}
    round_of_all = sum(calls[name] * seconds for name, seconds in first.items())
    rounds = max(_FEWEST, min(_ROUNDS, round(most / round_of_all)))
    taken: dict[str, list[float]] = {name: [] for name in found}
    for i in range(rounds):
        # In alternating order, as each way loses the caches to its predecessor.
        for name in list(found)[:: 1 if i % 2 else -1]:
            way = found[name]
            start = clock()
            for _ in range(calls[name]):
                way()
            taken[name].append((clock() - start) / calls[name])
    return {name: statistics.median(timings) for name, timings in taken.items()}


def _numbers(half: Half, bound: int) -> list[torch.Tensor]:
    """Return random numbers for the inputs of a half; integers below a bound."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for source in half.inputs:
        like = source.meta["val"]
        if like.dtype.is_floating_point:
            tensor = torch.rand(like.shape, generator=generator, dtype=like.dtype) + 0.5
        else:
            tensor = torch.randint(bound, like.shape, generator=generator).to(like.dtype)
        found.append(tensor)
    return found


def _agree(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    for one, other in zip(found, expected, strict=True):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        if not other.numel():
            continue
        scale = float(other.abs().max()) if other.dtype.is_floating_point else 0.0
        if not torch.allclose(one, other, rtol=_RELATIVE, atol=_ABSOLUTE * scale, equal_nan=True):
            return False
    return True
