"""``python -m tests.random_programs --seed S --minutes M`` runs programs, and prints those that fail."""

from __future__ import annotations

import argparse
import collections
import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tests.random_programs.generate import generate
from tests.random_programs.oracle import Verdict
from tests.random_programs.program import Program
from tests.random_programs.render import script
from tests.random_programs.runner import SECONDS, run_apart, warm_up
from tests.random_programs.shrink import same_failure, shrink


def main() -> int:
    """Run the programs of the command line, or until Ctrl-C; return 1 if a program failed."""
    asked = _arguments()
    without = asked.without.split(",") if asked.without else ()

    def judged(program: Program) -> Verdict:
        dtype = getattr(torch, asked.dtype)
        return run_apart(program, asked.seconds, loud=asked.loud, dtype=dtype)

    warm_up(judged, generate(asked.seed))
    counts: collections.Counter[str] = collections.Counter()
    refusals: collections.Counter[str] = collections.Counter()
    end = time.monotonic() + 60 * asked.minutes
    seed = asked.seed
    with contextlib.suppress(KeyboardInterrupt):
        while time.monotonic() < end and (asked.programs is None or seed < asked.seed + asked.programs):
            program = generate(seed, without)
            verdict = judged(program)
            counts[verdict.kind] += 1
            seed += 1
            if verdict.kind == "refused":
                refusals[general(verdict.reason)] += 1
            if verdict.kind in ("failed", "broken"):
                _report(seed - 1, program, verdict, asked, judged)
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    print(f"seeds {asked.seed} to {seed - 1}: {kinds or 'none'}")
    for reason, count in refusals.most_common():
        print(f"  refused {count}: {reason}")
    return int(counts["failed"] + counts["broken"] > 0)


def general(reason: str) -> str:
    """A refusal without the parts that differ between programs: numbers, names and lines of code."""
    line = re.sub(r"random_program_\d+\.py:\d+ in \w+ \(.*?\)(?=[ ,.;:]|$)", "a line", reason.split("\n")[0])
    line = re.sub(r"random_program\.\w+", "a Function", line)
    return re.sub(r"\d+", "N", line)[:300]


def _report(
    seed: int,
    program: Program,
    verdict: Verdict,
    asked: argparse.Namespace,
    judged: Callable[[Program], Verdict],
) -> None:
    """Shrink a failing program, and print it as a script."""
    print(f"seed {seed}: {verdict}", flush=True)

    def fails(candidate: Program) -> bool:
        return same_failure(judged(candidate), verdict)

    small = shrink(program, fails, asked.tries)
    text = script(small, asked.dtype)
    if asked.folder is None:
        print(text, flush=True)
        return
    asked.folder.mkdir(parents=True, exist_ok=True)
    file = asked.folder / f"seed_{seed}.py"
    file.write_text(text)
    print(f"  {small.size} statements and steps: {file}\n  {judged(small)}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.random_programs", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first program; the next has the next")
    parser.add_argument("--minutes", type=float, default=1, help="how long")
    parser.add_argument("--programs", type=int, help="how many at most")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long one program may take")
    parser.add_argument("--loud", action="store_true", help="show what programs print")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", "float16"),
        help="of weights and tensors",
    )
    parser.add_argument(
        "--without",
        help="operators, habit=choice pairs, actions, modes and variations not to draw, by commas",
    )
    parser.add_argument(
        "--tries", type=int, default=300, help="programs that the shrinker may run for a failure"
    )
    parser.add_argument(
        "--folder", type=Path, help="where scripts of failures go; without it they are printed"
    )
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
