"""A single notation of sizes for all values of a graph, with the names that the user gave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx_ir as ir
import sympy

from torch2ort.sizes import expressions as sizes


def name_sizes(model: ir.Model, names: Mapping[str, sympy.Expr]) -> None:
    """Write every symbolic size of ``model`` in the single notation, in place.

    Args:
        model: its sizes are in the notation of torch or onnx-shape-inference.
        names: symbol -> its new name. A symbol that is not in it keeps its name.
    """
    known: dict[str, int | str] = {}
    for value in _values(model):
        if value.shape is None or all(isinstance(d, int) for d in value.shape):
            continue
        value.shape = ir.Shape([_named(d, names, known) for d in value.shape])


def _named(
    dim: int | ir.SymbolicDim, names: Mapping[str, sympy.Expr], known: dict[str, int | str]
) -> int | str | None:
    if isinstance(dim, int) or dim.value is None:
        return dim if isinstance(dim, int) else None
    written = dim.value
    if written not in known:
        try:
            size = sizes.parse(written)
        except ValueError:
            # A function of torch that readers of a graph do not know: the size is unknown.
            known[written] = f"size_{len(known)}"
        else:
            size = size.xreplace({s: names[s.name] for s in size.free_symbols if s.name in names})
            known[written] = int(size) if size.is_Integer else sizes.text(size)
    return known[written]


def _values(model: ir.Model) -> Iterator[ir.Value]:
    graph = model.graph
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph.all_nodes():
        yield from node.outputs
