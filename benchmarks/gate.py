"""Fails if a benchmark's ratio is 10 % worse than the kept one.

``gate.py < printed.txt`` compares the output of benchmarks with kept.json, ``--keep FILE`` writes
it into a file. Ratios that depend on the matrix product differ between processors, so kept.json has none of
them. CI compares these with the commit before, on one machine: ``gate.py --kept before.json < after.txt``.

A ratio has two decimals, at the end of a part of a line or in front of ``of``. Ratios of peers
(torch.compile, PyOp) are skipped. Lower is better. Of several rounds the median counts: on a shared machine
a single round may be 10 % off. The input is the output of one environment.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from _machine import processor

WORSE = 1.10
PEERS = ("torch.compile", "onnxruntime-extensions", "aot_eager", "inductor", "eager")
KEPT = Path(__file__).with_name("kept.json")

# "torch2ort 0.66 of eager": the engine, the ratio, and its reference.
PART = re.compile(r"(?P<way>.*?)\s*\b(?P<ratio>\d+\.\d\d)(?P<peer> of .+)?")


def ratios_of_line(line: str) -> Iterator[tuple[str, float]]:
    """Yield name and value of each torch2ort ratio in a line.

    >>> list(ratios_of_line("BERT: torch2ort 0.66 of eager, 0.67 of torch.compile (which is 0.97 of eager)"))
    [('BERT: torch2ort of eager', 0.66), ('BERT: torch2ort of torch.compile', 0.67)]
    """
    title, _, rest = line.strip().partition(": ")
    title = re.sub(r" \(\d[^)]*\)", "", title)  # the time of eager PyTorch
    who = ""
    for part in re.split(r"[,;] ", re.sub(r" \([^)]*\)", "", rest)):
        found = PART.fullmatch(part.strip())
        if found is None:
            continue
        who = found["way"] or who
        if not who.startswith(PEERS):
            yield f"{title}: {who}{found['peer'] or ''}".replace(":  of", ": of"), float(found["ratio"])


def ratios(lines: Iterable[str]) -> dict[str, float]:
    """Return all ratios of some lines by their names; of one that was printed several times, the median."""
    found: dict[str, list[float]] = {}
    for line in lines:
        for name, value in ratios_of_line(line):
            found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def compare_ratios(kept: dict[str, float], found: dict[str, float]) -> Iterator[tuple[bool, str]]:
    """Yield for each kept ratio whether it holds, and a line about it."""
    for name, before in kept.items():
        now = found.get(name)
        if now is None:
            yield False, f"MISSING {name}: kept {before:.2f}, and nothing was printed"
        elif now > before * WORSE:
            yield False, f"WORSE   {name}: {now:.2f}, kept {before:.2f} ({now / before - 1:+.0%})"
        else:
            yield True, f"holds   {name}: {now:.2f}, kept {before:.2f} ({now / before - 1:+.0%})"


def main() -> None:
    """Keep or compare the ratios of the input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kept", type=Path, default=KEPT, help="the ratios to compare with")
    parser.add_argument("--keep", type=Path, help="write the ratios into this file, and compare nothing")
    arguments = parser.parse_args()
    found = ratios(sys.stdin)
    if not found:
        sys.exit("no ratio was printed; pipe what the benchmarks print into the gate")
    if arguments.keep:
        arguments.keep.write_text(json.dumps({"processor": processor(), "ratios": found}, indent=2) + "\n")
        return
    kept: dict[str, Any] = json.loads(arguments.kept.read_text())
    if kept["processor"] != processor():
        print(f"kept on {kept['processor']}, measured on {processor()}")
    results = list(compare_ratios(kept["ratios"], found))
    print("\n".join(line for _, line in results))
    for name in found.keys() - kept["ratios"].keys():
        print(f"not kept {name}: {found[name]:.2f}")
    sys.exit(not all(holds for holds, _ in results))


if __name__ == "__main__":
    main()
