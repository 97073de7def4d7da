"""The report of torch.compile's graphs: ``torch2ort.compile_report()``."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch2ort.support.startup_timing import PHASES, Startup

# The largest number of graphs in the report; the oldest are dropped.
_MOST = 1000
# The shortest phase, in seconds, that the text mentions.
_SHOWN = 5e-3


@dataclass(frozen=True)
class CompiledHalf:
    """One graph of ONNX.

    Attributes:
        kind: ``"inference"``, ``"forward"`` or ``"backward"``.
        operators: ONNX operator -> number of its nodes in ONNX Runtime's graph.
        kernels: PyTorch's kernel -> number of nodes that call it.
        functions: autograd.Function -> number of nodes that call it.
        cached: True if it was read from the export cache.
        bypass_reason: the reason why the cache does not store it; ``None`` if it does, or the cache is off.
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
        place: the line where its code ends, as ``file.py:12, in forward``; empty where it is unknown.
        break_reason: the reason why dynamo ended it there; ``None`` if the code itself ends.
        halves: its ONNX graphs, in the order of compilation.
        started: the timings of its start.
    """

    place: str
    break_reason: str | None
    halves: list[CompiledHalf] = field(default_factory=list)
    started: Startup = field(default_factory=lambda: Startup("a graph"), repr=False, compare=False)

    @property
    def startup(self) -> dict[str, float]:
        """The seconds of its start so far, by phase, as in :attr:`torch2ort.ORTModule.startup`."""
        return dict(self.started.seconds)

    def __str__(self) -> str:
        end = "" if self.break_reason is None else f", broken: {self.break_reason}"
        took = ", ".join(f"{name} {s:.2f} s" for name, s in self.startup.items() if s >= _SHOWN)
        lines = [f"graph to {self.place or 'an unknown line'}{end}", *(f"  {h}" for h in self.halves)]
        return "\n".join([*lines, *([f"  start: {took}"] if took else [])])


@dataclass(frozen=True)
class CompileReport:
    """The graphs that ``torch.compile(backend="torch2ort")`` compiled since the process or dynamo's reset.

    Attributes:
        graphs: in the order of compilation; graphs that raised an error are not included.
    """

    graphs: tuple[CompiledGraph, ...]

    @property
    def breaks(self) -> tuple[tuple[str, str], ...]:
        """Place and reason of each graph break."""
        return tuple((g.place, g.break_reason) for g in self.graphs if g.break_reason is not None)

    @property
    def startup(self) -> dict[str, float]:
        """The seconds of all graphs' starts so far, by phase; empty where there are no graphs."""
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
    """Return the number of graphs, including the one that is being compiled."""
    return len(_graphs) + 1


def forget() -> None:
    """Begin a new report."""
    _graphs.clear()


def compile_report() -> CompileReport:
    """Return the graphs that ``torch.compile(backend="torch2ort")`` compiled so far, and their operators.

    >>> import torch
    >>> torch.compiler.reset()
    >>> compile_report().graphs
    ()

    Returns:
        The report, which prints as text. ``torch.compiler.reset()`` begins a new one.
    """
    return CompileReport(tuple(_graphs))


def _counted(names: Mapping[str, int]) -> str:
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in sorted(names.items()))
