"""``python -m torch2ort compare``: the first module at which the statistics of two runs differ."""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch2ort.hooks.statistics_records import Record, read, steps

# Relative difference between two ways to compute the same in float32.
_TOLERANCE = 1e-4
_WIDTH, _AROUND = 24, 6
_LEAST = -9  # power of ten at which a bar begins


def add_parser(commands: Any) -> None:
    """Add the subcommand to ``commands``, the result of ``ArgumentParser.add_subparsers``."""
    parser = commands.add_parser(
        "compare",
        help="show the first module at which two runs differ, by the files of a StatisticsSubscriber",
        epilog="The exit status is 0 if the runs are the same, else 1.",
    )
    parser.add_argument("a", metavar="A", help="folder of the first run")
    parser.add_argument("b", metavar="B", help="folder of the second run")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=_TOLERANCE,
        help="difference of min, max, mean or std that counts, relative to the values (default: %(default)g)",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="draw the differences, as .png, .svg or .pdf")
    parser.set_defaults(run=_compare)


@dataclass(frozen=True)
class Pair:
    """One tensor of two runs.

    Attributes:
        step: number of the step.
        a: in the first run.
        b: in the second; ``None`` if it is missing there.
    """

    step: int
    a: Record
    b: Record | None

    @property
    def difference(self) -> float:
        """Largest relative difference of a statistic; infinity if shape, dtype, nan or inf differ."""
        a, b = self.a, self.b
        if b is None or (a.shape, a.dtype, a.nan, a.inf) != (b.shape, b.dtype, b.nan, b.inf):
            return math.inf
        if None in (a.min, b.min):
            return 0.0 if a.min == b.min else math.inf
        numbers = [(getattr(a, name), getattr(b, name)) for name in ("min", "max", "mean", "std")]
        scale = max(abs(value) for pair in numbers for value in pair)
        return max(abs(x - y) for x, y in numbers) / scale if scale else 0.0

    @property
    def name(self) -> str:
        """The tensor in words."""
        a = self.a
        more = f", call {a.call}" if a.call else ""
        return f"{a.module or 'the model'} ({a.kind}), {a.direction}, output {a.output}{more}"


def _compare(arguments: argparse.Namespace) -> int:
    try:
        pairs = _pairs(Path(arguments.a), Path(arguments.b))
        lines = list(_described(pairs, arguments.tolerance))
        if arguments.output:
            _draw(pairs, arguments.tolerance, Path(arguments.output))
            lines.append(f"drawn in {arguments.output}")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(*lines, sep="\n")
    return int(_parting(pairs, arguments.tolerance) is not None)


def _pairs(a: Path, b: Path) -> list[Pair]:
    """Return the tensors of the steps that both runs have, in the order of the first run.

    Raises:
        ValueError: a folder contains no statistics, the runs have no step in common, or the first run lacks a
            tensor.
    """
    first, second = steps(a), steps(b)
    for folder, found in ((a, first), (b, second)):
        if not found:
            raise ValueError(
                f"{folder}: no statistics; expected files step_000000.jsonl that a StatisticsSubscriber wrote"
            )
    common = sorted(first.keys() & second.keys())
    if not common:
        raise ValueError(f"{a} and {b} have no step in common: {_range(first)}, and {_range(second)}")
    pairs = []
    for step in common:
        others = {record.place: record for record in read(second[step])}
        pairs += [Pair(step, record, others.pop(record.place, None)) for record in read(first[step])]
        if others:
            missing = next(iter(others.values()))
            raise ValueError(
                f"step {step}: {b} has statistics that {a} lacks, of {Pair(step, missing, None).name}; the "
                f"models or the depths of their subscribers differ"
            )
    return pairs


def _range(found: dict[int, Path]) -> str:
    return f"steps {min(found)} to {max(found)}"


def _parting(pairs: Sequence[Pair], tolerance: float) -> Pair | None:
    return next((pair for pair in pairs if pair.difference > tolerance), None)


def _described(pairs: Sequence[Pair], tolerance: float) -> Iterator[str]:
    numbers = sorted({pair.step for pair in pairs})
    yield f"{len(numbers)} steps in common, {numbers[0]} to {numbers[-1]}, {len(pairs)} tensors"
    found = _parting(pairs, tolerance)
    if found is None:
        greatest = max(pairs, key=lambda pair: pair.difference, default=None)
        where = f"; the largest, {greatest.difference:.1e}, is at {greatest.name}" if greatest else ""
        yield f"the runs are the same: no difference above {tolerance:g}{where}"
        return
    yield f"the runs first differ in step {found.step} at {found.name}"
    yield f"  A: {_text(found.a)}"
    yield f"  B: {_text(found.b)}"
    yield f"step {found.step}, in the order of A, differences relative to the values:"
    same_step = [pair for pair in pairs if pair.step == found.step]
    middle = same_step.index(found)
    for pair in same_step[max(0, middle - _AROUND) : middle + _AROUND + 1]:
        mark = ">" if pair is found else " "
        yield f"{mark} {_bar(pair.difference)} {pair.difference:8.1e}  {pair.name}"


def _text(record: Record | None) -> str:
    if record is None:
        return "not there"
    numbers = [
        f"{name} {value:.6g}" if value is not None else f"{name} -"
        for name, value in ((n, getattr(record, n)) for n in ("min", "max", "mean", "std"))
    ]
    counts = f"zeros {record.zeros}, nan {record.nan}, inf {record.inf}"
    return f"{record.dtype} {list(record.shape)}, {', '.join(numbers)}, {counts}"


def _bar(difference: float) -> str:
    """Return a bar whose length is the power of ten of a difference."""
    power = 0.0 if math.isinf(difference) else math.log10(max(difference, 10.0**_LEAST))
    filled = round(_WIDTH * min(1.0, (power - _LEAST) / -_LEAST))
    return "#" * filled + "." * (_WIDTH - filled)


def _draw(pairs: Sequence[Pair], tolerance: float, path: Path) -> None:
    """Draw the differences of the first step that differs, else of the last one, and those of all steps.

    Raises:
        ValueError: matplotlib is not installed, or does not support the file's suffix.
    """
    try:
        figure_module: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ValueError(
            f"-o {path}: drawing needs matplotlib ({error}); install it: pip install 'torch2ort[watch]'"
        ) from error
    found = _parting(pairs, tolerance) or pairs[-1]
    shown = [pair for pair in pairs if pair.step == found.step]
    figure = figure_module.Figure(figsize=(10, 6), layout="constrained")
    above, below = figure.subplots(2)
    for direction, color in (("forward", "tab:blue"), ("backward", "tab:orange")):
        points = [(i, p.difference) for i, p in enumerate(shown) if p.a.direction == direction]
        above.plot(
            [i for i, _ in points],
            [_drawn(d) for _, d in points],
            "o-",
            color=color,
            markersize=3,
            label=direction,
        )
    if found.difference > tolerance:
        position = shown.index(found)
        above.axvline(position, color="tab:red", linewidth=1)
        above.annotate(found.name, (position, _drawn(found.difference)), fontsize=8)
    above.set_title(f"step {found.step}, in the order of A")
    above.set_xlabel("tensor")
    greatest = {step: max(p.difference for p in pairs if p.step == step) for step in {p.step for p in pairs}}
    below.plot(list(greatest), [_drawn(d) for d in greatest.values()], "o-", color="black", markersize=3)
    below.set_xlabel("step")
    for axes in (above, below):
        axes.set_yscale("log")
        axes.set_ylabel("relative difference")
        axes.axhline(tolerance, color="gray", linestyle=":", label="tolerance")
    above.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=110)
    except ValueError as error:
        raise ValueError(f"-o {path}: {error}") from error


def _drawn(difference: float) -> float:
    """Clip a difference to the range of the logarithmic axis."""
    return min(max(difference, 10.0**_LEAST), 10.0)
