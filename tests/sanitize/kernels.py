"""Runs snippets behind fences: ``python kernels.py NAME...`` prints what came of each, as JSON.

A process that is stopped at a fence is one snippet's; the others go on.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Mapping

import onnxruntime
import torch

from tests.ops.shapes import SHAPES
from tests.ops.snippets import GROUPS, Snippet
from tests.ops.sweep import run

ALL: dict[str, Snippet] = {**{n: s for snippets in GROUPS.values() for n, s in snippets.items()}, **SHAPES}


class FencedOptions(onnxruntime.SessionOptions):
    """Each value of a session gets memory of its own, which an arena would cut from larger blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.enable_cpu_mem_arena = False
        self.enable_mem_pattern = False


def outcome(snippets: Mapping[str, Snippet]) -> str:
    """``equal``, ``refused``, ``different``, or ``stopped`` by a signal; in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            state = run(snippets).state
        except Exception:
            state = "different"
        os.write(writer, state.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as opened:
        state = opened.read()
    _, status = os.waitpid(child, 0)
    return state if status == 0 else "stopped"


def sweep(names: list[str], size: int) -> dict[str, str]:
    """What came of each snippet: ``size`` at a time, and fewer where that is not ``equal``."""
    outcomes: dict[str, str] = {}
    for start in range(0, len(names), size):
        part = names[start : start + size]
        state = outcome({name: ALL[name] for name in part})
        outcomes |= (
            dict.fromkeys(part, state) if state == "equal" or size == 1 else sweep(part, size // 4 or 1)
        )
    return outcomes


if __name__ == "__main__":
    onnxruntime.SessionOptions = FencedOptions
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(json.dumps(sweep(sys.argv[1:] or list(ALL), 16)))
