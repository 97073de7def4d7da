"""Profiles of the nodes of sessions, while a tracer is active.

onnxruntime profiles the sessions that are created inside of :meth:`Tracer.tracing`, from their first run to
:meth:`Tracer.take`.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from torch2ort.graph.graph_traversal import function_of
from torch2ort.graph.node_provenance import Origin, kernel_name
from torch2ort.pythonop import Site

_KERNEL = "_kernel_time"
# They separate the name of a node from the suffix that onnxruntime adds when it replaces it.
_SEPARATORS = ("/", "_token_")


@dataclass(frozen=True)
class Event:
    """One run of one node.

    Attributes:
        name: name of the node in the session.
        operator: its operator type.
        function: the Function, or Functions, that it calls; ``""`` for an operator of ONNX Runtime's.
        origin: the module and line that it comes from.
        begin: microseconds since an instant that is the same for all events.
        duration: microseconds.
        memory: bytes of the values alive while it runs, of those that nodes of its session computed.
        thread: the thread's id in the process.
    """

    name: str
    operator: str
    function: str
    origin: Origin
    begin: float
    duration: float
    memory: int
    thread: int


@dataclass
class _Traced:
    session: Any
    model: Path
    origins: Mapping[str, Origin]
    functions: Mapping[str, str]


@dataclass
class Tracer:
    """Collection of sessions and their profiles."""

    _traced: list[_Traced] = field(default_factory=list)
    _folder: Any = field(default_factory=lambda: tempfile.TemporaryDirectory(prefix="torch2ort-profile-"))
    _origins: Mapping[str, Origin] = field(default_factory=dict)
    _functions: Mapping[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Profile the sessions that are created inside of the block, in any thread."""
        global _active
        before, _active = _active, self
        try:
            yield
        finally:
            _active = before

    def prepare(self, settings: Any) -> None:
        """Enable profiling in the settings of the next session."""
        number = len(self._traced)
        settings.enable_profiling = True
        settings.profile_file_prefix = str(Path(self._folder.name, f"session_{number}"))
        settings.optimized_model_filepath = str(Path(self._folder.name, f"session_{number}.onnx"))

    def describe(self, origins: Mapping[str, Origin], functions: Mapping[str, str]) -> None:
        """Set the origins and the Functions of the next session's nodes."""
        self._origins, self._functions = origins, functions

    def note(self, session: Any) -> None:
        """Add the session that was created."""
        model = Path(self._folder.name, f"session_{len(self._traced)}.onnx")
        self._traced.append(_Traced(session, model, self._origins, self._functions))

    def take(self) -> list[Event]:
        """End the profiles, and return their events; the files are deleted."""
        events: list[Event] = []
        try:
            for traced in self._traced:
                start = traced.session.get_profiling_start_time_ns() / 1000
                path = Path(traced.session.end_profiling())
                events += _events(json.loads(path.read_text()), traced, start)
        finally:
            self._traced = []
            self._folder.cleanup()
        return sorted(events, key=lambda event: event.begin)


_active: Tracer | None = None


def active_tracer() -> Tracer | None:
    """Return the tracer that collects new sessions, if there is one."""
    return _active


def describe(graph: onnx.GraphProto, sites: Mapping[str, Site]) -> None:
    """Pass the origins of the next session's nodes to the active tracer.

    Args:
        graph: a graph with the names and metadata of an export.
        sites: the site of each node that calls a Function, by node name.
    """
    if _active is not None:
        names = {name: kernel_name(site) for name, site in sites.items()}
        _active.describe({node.name: Origin.of(node) for node in graph.node}, names)


@contextlib.contextmanager
def profiled(settings: Any) -> Iterator[list[Any]]:
    """Profile the session that the block creates with these settings and puts into the list."""
    tracer, made = _active, []  # type: ignore[var-annotated]
    if tracer is not None:
        tracer.prepare(settings)
    yield made
    if tracer is not None:
        tracer.note(made[0])


def _events(written: list[dict[str, Any]], traced: _Traced, start: float) -> Iterator[Event]:
    model = onnx.load(traced.model, load_external_data=False) if traced.model.exists() else onnx.ModelProto()
    nodes = {node.name: node for node in model.graph.node}
    memory = _Memory(model.graph)
    for event in written:
        if event.get("cat") != "Node" or not event["name"].endswith(_KERNEL):
            continue
        name, found = event["name"].removesuffix(_KERNEL), event["args"]
        node = nodes.get(name)
        origin = _by_prefix(traced.origins, name, Origin("", "", ""))
        function = ""
        if found["op_name"] in ("PythonOp", "PythonOpGrad", "ATen"):
            named = function_of(node) if node is not None else ""
            function = _by_prefix(traced.functions, name, named) or name
        yield Event(
            name=name,
            operator=found["op_name"],
            function=function,
            origin=origin,
            begin=start + event["ts"],
            duration=event["dur"],
            memory=memory.at(name, int(found.get("output_size") or 0)),
            thread=event["tid"],
        )


def _by_prefix(known: Mapping[str, Any], name: str, otherwise: Any) -> Any:
    """Return the entry of the node that ``name`` was made from."""
    if name in known:
        return known[name]
    for end in range(len(name) - 1, 0, -1):
        if name.startswith(_SEPARATORS, end) and name[:end] in known:
            return known[name[:end]]
    return otherwise


class _Memory:
    """The bytes that are alive while nodes run: the outputs of nodes until their last use.

    The size of a node's outputs is known as a whole, and is alive until the last use of any of them.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._makers = {output: node.name for node in graph.node for output in node.output if output}
        self._readers: dict[str, set[str]] = {}
        self._inputs = {node.name: [i for i in node.input if i in self._makers] for node in graph.node}
        for node in graph.node:
            for value in node.input:
                if value in self._makers:
                    self._readers.setdefault(self._makers[value], set()).add(node.name)
        for value in graph.output:
            if value.name in self._makers:
                # The empty name is no node's: the value is alive until the end of the run.
                self._readers.setdefault(self._makers[value.name], set()).add("")
        self._live: dict[str, int] = {}
        self._waiting: dict[str, set[str]] = {}

    def at(self, name: str, size: int) -> int:
        """Return the bytes alive in a node's run, with its outputs' ``size``; called in the order of runs."""
        if name in self._waiting:
            # The session's next run begins.
            self._live.clear()
            self._waiting.clear()
        self._live[name] = size
        self._waiting[name] = set(self._readers.get(name, ()))
        total = sum(self._live.values())
        if not self._waiting[name]:
            del self._live[name]
        for value in self._inputs.get(name, ()):
            maker = self._makers[value]
            left = self._waiting.get(maker)
            if left is not None:
                left.discard(name)
                if not left:
                    self._live.pop(maker, None)
        return total
