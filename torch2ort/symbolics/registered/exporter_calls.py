"""Translation of calls of Functions and operators by registered callables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import sympy

from torch2ort._torch import onnx_exporter as private
from torch2ort.errors import ExportError, Torch2OrtError
from torch2ort.program.target import Target
from torch2ort.pythonop import ONNX_TYPES, Site
from torch2ort.pythonop.abstract_run.forward_probe import UserError
from torch2ort.pythonop.registry import Exporter
from torch2ort.sizes.symbols import named
from torch2ort.symbolics.registered.builder import GraphBuilder
from torch2ort.symbolics.registered.values import GraphValue

# Key in a node's ``meta``: a registered callable wrote the node, and no pass replaces it.
WRITTEN_BY_USERS = "torch2ort_written_by_users"


def map_site(
    exporter: Exporter,
    site: Site,
    inputs: Sequence[ir.Value],
    names: Mapping[str, sympy.Expr],
    target: Target,
) -> list[ir.Value] | None:
    """Return the outputs of ``site``, computed by the operators of its exporter.

    Args:
        exporter: the exporter that is registered for the Function.
        site: the call.
        inputs: its tensor arguments.
        names: torch's symbols -> their names in the graph.
        target: the runtime of the graph.

    Returns:
        One value per tensor output; ``None`` if the exporter declines.

    Raises:
        ExportError: the exporter returned values of the wrong number, type or graph.
        UserError: the exporter raised.
    """
    builder = GraphBuilder(site.func_name, names, target)
    supply = iter(inputs)
    positions = set(site.tensor_positions)
    arguments = [
        builder.wrap(next(supply)) if i in positions else value for i, value in enumerate(site.arguments)
    ]
    returned = run_user(exporter.call, builder, arguments, {})
    if returned is None:
        return None
    kinds = site.known_result.tensors
    values = returned_values(builder, returned, site.func_name, "exporter", len(kinds))
    for i, (value, kind) in enumerate(zip(values, kinds, strict=True)):
        expected = ir.DataType(ONNX_TYPES[kind.dtype])
        if value.dtype not in (None, expected):
            raise ExportError(
                f"{site.func_name}: its exporter returned output {i} as {builder.wrap(value).dtype}, but "
                f"forward returns {kind.dtype}; add g.op('Cast', value, to={kind.dtype})"
            )
        shape = [named(size, names) for size in site.shapes[i]]
        if value.shape is not None and _contradict(builder.wrap(value).shape or [], shape):
            raise ExportError(
                f"{site.func_name}: its exporter returned output {i} with shape "
                f"{builder.wrap(value).shape}, but "
                f"forward returns [{', '.join(map(str, shape))}]"
            )
        value.dtype = expected
    return commit(builder, values, inputs)


def _contradict(shape: Sequence[Any], expected: Sequence[int | str]) -> bool:
    """Return True if two shapes cannot be the same."""
    return len(shape) != len(expected) or any(
        isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(shape, expected, strict=True)
    )


def run_user(
    call: Callable[..., Any], builder: GraphBuilder, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> Any:
    """Call a user's callable and return its result; its exception reaches the user unchanged.

    Raises:
        UserError: the callable raised; the error contains the exception.
    """
    try:
        return call(builder, *arguments, **keywords)
    except Torch2OrtError:
        raise
    except Exception as error:
        raise UserError(error) from None


def returned_values(builder: GraphBuilder, returned: Any, who: str, what: str, count: int) -> list[ir.Value]:
    """Return the graph values that a user's callable returned.

    Raises:
        ExportError: there are too many, too few, or some are no values of this graph.
    """
    values = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    for value in values:
        if not isinstance(value, GraphValue):
            raise ExportError(
                f"{who}: its {what} returned {returned!r}; expected a graph value, a tuple of them, or None"
            )
    if len(values) != count:
        raise ExportError(
            f"{who}: its {what} returned {len(values)} value{'s' * (len(values) != 1)}; expected {count}, "
            f"one for each tensor output"
        )
    return [builder.unwrap(v, f"output {i} of its {what}") for i, v in enumerate(values)]


def commit(builder: GraphBuilder, values: list[ir.Value], inputs: Sequence[ir.Value]) -> list[ir.Value]:
    """Add the builder's nodes to the translation in progress.

    Returns:
        ``values``; a copy of one that is an input or occurs twice, as the translation names its outputs.
    """
    taken = {id(value) for value in inputs}
    outputs: list[ir.Value] = []
    for value in values:
        if id(value) in taken:
            node = ir.Node("", "Identity", [value], num_outputs=1)
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
            builder.nodes.append(node)
            outputs.append(node.outputs[0])
        else:
            taken.add(id(value))
            outputs.append(value)
    for node in builder.nodes:
        node.meta[WRITTEN_BY_USERS] = True
    private.recorded_nodes().extend(builder.nodes)
    return outputs
