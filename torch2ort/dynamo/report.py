"""What torch.compile's graphs became: ``torch2ort.compile_report()``."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch2ort.support.startup_timing import PHASES, Startup

# Of what is compiled over and over the oldest is forgotten.
_MOST = 1000
# Seconds of a phase, from which on the text says them.
_SHOWN = 5e-3


@dataclass(frozen=True)
class CompiledHalf:
    """One graph of ONNX.

    Attributes:
        kind: ``"inference"``, ``"forward"`` or ``"backward"``.
        operators: ONNX operator -> how many nodes of it ONNX Runtime was given.
        kernels: PyTorch's kernel -> how many nodes call it.
        functions: autograd.Function -> how many nodes call it.
        cached: whether it came out of the export cache.
        bypass_reason: why the cache does not keep it; ``None`` if it does, or the cache is switched off.
    """

    kind: str
    operators: Mapping[str, int]
    kernels: Mapping[str, int]
    functions: Mapping[str, int]
    cached: bool = False
    bypass_reason: str | None = None

    def __str__(self) -> str:
        parts = [f"{self.kind}: {_counted(self.operators) or 'nothing'} in ONNX Runtime"]
        if self.kernels:
            parts.append(f"{_counted(self.kernels)} in PyTorch's kernels")
        if self.functions:
            parts.append(f"{_counted(self.functions)} as Functions")
        cache = " (cached)" if self.cached else ""
        if self.bypass_reason is not None:
            cache = f" (not cached: {self.bypass_reason})"
        return "; ".join(parts) + cache


@dataclass
class CompiledGraph:
    """One graph that dynamo captured.

    Attributes:
        place: where its code ends, as ``file.py:12, in forward``; empty where nobody knows.
        break_reason: why dynamo ended it there; ``None`` if the code itself ends.
        halves: what it became, in the order of compilation.
        started: what its start took.
    """

    place: str
    break_reason: str | None
    halves: list[CompiledHalf] = field(default_factory=list)
    started: Startup = field(default_factory=lambda: Startup("a graph"), repr=False, compare=False)

    @property
    def startup(self) -> dict[str, float]:
        """What its start took so far, in seconds by phase, as of :attr:`torch2ort.ORTModule.startup`."""
        return dict(self.started.seconds)

    def __str__(self) -> str:
        end = "" if self.break_reason is None else f", broken: {self.break_reason}"
        took = ", ".join(f"{name} {s:.2f} s" for name, s in self.startup.items() if s >= _SHOWN)
        lines = [f"graph to {self.place or 'an unknown line'}{end}", *(f"  {h}" for h in self.halves)]
        return "\n".join([*lines, *([f"  start: {took}"] if took else [])])


@dataclass(frozen=True)
class CompileReport:
    """What ``torch.compile(backend="torch2ort")`` compiled since the process began or dynamo was reset.

    Attributes:
        graphs: in the order of compilation; those that were refused are not among them.
    """

    graphs: tuple[CompiledGraph, ...]

    @property
    def breaks(self) -> tuple[tuple[str, str], ...]:
        """Place and reason of each break behind a graph."""
        return tuple((g.place, g.break_reason) for g in self.graphs if g.break_reason is not None)

    @property
    def startup(self) -> dict[str, float]:
        """What the starts of all graphs took so far, in seconds by phase; empty where there are none."""
        return {name: sum(g.startup.get(name, 0.0) for g in self.graphs) for name in PHASES if self.graphs}

    def __str__(self) -> str:
        count = len(self.graphs)
        head = f"{count} graph{'s' * (count != 1)}, {len(self.breaks)} broken"
        return "\n".join([head, *map(str, self.graphs)])


_graphs: collections.deque[CompiledGraph] = collections.deque(maxlen=_MOST)


def note(graph: CompiledGraph) -> None:
    """Add a graph to the report."""
    _graphs.append(graph)


def number() -> int:
    """How many graphs there are, with the one that is compiled now."""
    return len(_graphs) + 1


def forget() -> None:
    """Begin a new report."""
    _graphs.clear()


def compile_report() -> CompileReport:
    """What ``torch.compile(backend="torch2ort")`` compiled so far, and what runs where.

    >>> import torch
    >>> torch.compiler.reset()
    >>> compile_report().graphs
    ()

    Returns:
        The report, which prints as a text. ``torch.compiler.reset()`` begins a new one.
    """
    return CompileReport(tuple(_graphs))


def _counted(names: Mapping[str, int]) -> str:
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in sorted(names.items()))
