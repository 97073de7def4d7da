"""The ONNX graph of a model that trains: made on request, as no session of a step runs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch2ort import io_schema
from torch2ort.cache.key.export_lock import exclusive
from torch2ort.cache.key.key import tensor_of
from torch2ort.capture.sample_call import PREFIX
from torch2ort.capture.trace import Trace
from torch2ort.graph.graph import Graph
from torch2ort.graph.node_provenance import Origin
from torch2ort.log import DEVINFO, logger, suppress_libraries
from torch2ort.program.target import Target
from torch2ort.pythonop.autocast import off
from torch2ort.sizes.memory_layout import form_of
from torch2ort.support.lazy import Lazy
from torch2ort.symbolics.lowering import lower


def graph_of_trace(
    model: torch.nn.Module, traced: Trace, inputs: io_schema.Schema, target: Target
) -> Lazy[Graph]:
    """Return the graph of a trace, made on request; until then it holds no tensors of the model or the call.

    Args:
        model: the traced module.
        traced: the trace; it is changed.
        inputs: schema of the call that was traced.
        target: the target of the graph.
    """
    program = traced.program
    kept = [(values, _forms(model, values)) for values in (program.state_dict, program.constants)]
    for values, forms in kept:
        for name in forms:
            del values[name]
    program.example_inputs = None
    kind = type(model)

    def make() -> Graph:
        for values, forms in kept:
            values.update({name: form() for name, form in forms.items()})
        with suppress_libraries(), exclusive.exporting(), off():
            graph, _ = lower(model, traced, inputs, target)
        log_graph(kind.__name__, graph)
        return graph

    return Lazy(make)


def _forms(model: torch.nn.Module, values: Mapping[str, Any]) -> dict[str, Callable[[], torch.Tensor]]:
    """Return functions that make tensors like the model's own: the graph contains none of their values."""
    own = {name: values[name] for name in values if tensor_of(model, name.removeprefix(PREFIX)) is not None}
    return {name: form_of(value) for name, value in own.items()}


def log_graph(name: str, graph: Graph) -> None:
    """Log the graph of a model whose class has this name."""
    if logger.isEnabledFor(DEVINFO):
        logger.log(DEVINFO, "export of %s\n%s", name, _report(graph))
    logger.info("exported %s: %d nodes, %d PythonOps", name, len(graph.proto.graph.node), len(graph.sites))


def _report(graph: Graph) -> str:
    """Return a line per kind of operator with its count, then one per call that runs in Python."""
    nodes = graph.proto.graph.node
    counts = Counter(f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in nodes)
    lines = [f"  {count:>5}  {name}" for name, count in counts.most_common()]
    for node in nodes:
        site = graph.sites.get(node.name)
        if site is not None:
            origin = Origin.of(node)
            where = f" ({origin.line})" if origin.line else ""
            lines.append(f"  {node.name} runs {site.func_name} in Python{where}")
    return "\n".join(lines)
