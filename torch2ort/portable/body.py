"""The body of a call of a Function: the computation of forward, as operators of ONNX."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch2ort import io_schema
from torch2ort.capture.sample_call import Call
from torch2ort.capture.torch_modes import Modes
from torch2ort.capture.trace import trace
from torch2ort.errors import ExportError, UnsupportedOperatorError
from torch2ort.graph.graph import Graph
from torch2ort.graph.graph_traversal import python_op_nodes
from torch2ort.graph.node_provenance import kernels_said
from torch2ort.graph.refinements import drop_exact
from torch2ort.graph.weights import with_weights
from torch2ort.portable.body_sizes import settle_sizes
from torch2ort.portable.probe import WAY_OUT
from torch2ort.program.autocast_casts import insert_autocast_casts
from torch2ort.program.detach_range_bounds import detach_bounds
from torch2ort.program.inline_autograd_functions import NotInlinedError, applied, refuse_to_inline
from torch2ort.program.target import Target
from torch2ort.pythonop import TENSOR, Site, uses_setup_context
from torch2ort.pythonop.autocast import autocast_context
from torch2ort.sizes.symbols import is_constant
from torch2ort.support.source_lines import users_line
from torch2ort.symbolics.lowering import lower, sizes_of


@dataclass(frozen=True)
class Body:
    """The operators that replace a call.

    Attributes:
        graph: its inputs are the call's tensors, its outputs those of the call's node.
        parameters: name of each argument of the call.
    """

    graph: Graph
    parameters: tuple[str, ...]


def parameters_of(site: Site) -> tuple[str, ...]:
    """Return the name of each argument of a call, as in the signature of forward."""
    assert site.function is not None
    try:
        parameters = list(inspect.signature(site.function.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    else:
        parameters = parameters[0 if uses_setup_context(site.function) else 1 :]
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "argument")
    count = len(site.arguments)
    return (*names[:count], *(f"{rest}_{i}" for i in range(count - len(names))))


def body_of(
    site: Site, tensors: Sequence[torch.Tensor], traced: Sequence[torch.Tensor], target: Target
) -> Body:
    """Trace the forward of a call and translate it to ONNX.

    Args:
        site: the call.
        tensors: its tensors on the sample.
        traced: its tensors in the trace of the model.
        target: the target of the graph.

    Raises:
        ExportError: forward cannot be traced, does more than compute, or its trace is valid for some sizes
            only.
        UnsupportedOperatorError: ONNX lacks an operator.
    """
    names = parameters_of(site)
    given = [names[position] for position in site.tensor_positions]
    kind = inspect.Parameter.POSITIONAL_ONLY
    signature = io_schema.Signature(inspect.Signature([inspect.Parameter(n, kind) for n in given]))
    flat, schema = io_schema.flatten(dict(zip(given, tensors, strict=True)))
    varying = [
        {i: torch.export.Dim.AUTO for i, size in enumerate(tensor.shape) if not is_constant(size)} or None
        for tensor in traced
    ]
    call = Call(signature, flat, schema, Modes.now(), varying)
    try:
        refuse_to_inline(_as_written(site))
        with applied(site, counts=True) as function:
            forward = _Forward(site, function)
            found = trace(forward, call, training=False)
            sites = insert_autocast_casts(found.program.graph_module, forward, target, gradients=False)
            found.sites.update({own.key: own for own in sites})
            detach_bounds(found.program.graph_module)
            graph, weights = lower(forward, found, schema, target)
            sizes = sizes_of(found, given)
    except NotInlinedError as reason:
        cause = reason.__cause__
        if isinstance(cause, UnsupportedOperatorError):
            raise UnsupportedOperatorError(f"{site.func_name} is not portable: {cause}") from cause
        said = str(cause).splitlines()[0] if isinstance(cause, ExportError) else str(reason)
        line = users_line(cause) if cause is not None and not isinstance(cause, ExportError) else ""
        raise ExportError(f"{site.func_name} is not portable: {said}{line}. {WAY_OUT}") from cause
    settle_sizes(site, sizes, traced)
    if graph.weights:
        graph = replace(graph, proto=with_weights(graph, weights, folds=False), weights={})
    drop_exact(graph.proto.graph)
    _refuse_kernels(site, graph)
    return Body(replace(graph, sites={}), names)


def _as_written(site: Site) -> Site:
    """Return the call without its recorded effects: the trace shows them, and written arguments are results.

    A call that changes Python objects, such as a counter, changes them where its class runs.
    """
    result = replace(site.known_result, mutated=(), hidden=(), observed=True, effects=False)
    return replace(site, result=result, remembers=False, keeps_state=False, autocast=None)


def tensors_of_node(site: Site, found: Any, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the output tensors of the node of a call.

    Args:
        site: the call.
        found: its result.
        given: its argument tensors after the call.
    """
    result = site.known_result
    values = found if isinstance(found, tuple) else (found,)
    returned = [value for value, kind in zip(values, result.outputs, strict=True) if kind is TENSOR]
    left = dict(zip(site.tensor_positions, given, strict=True))
    return [*returned, *(left[position] for position in result.hidden)]


class _Forward(torch.nn.Module):
    """A call of a Function as a module that returns the output tensors of its node."""

    def __init__(self, site: Site, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function, self._site = function, site

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return the tensors that the node of the call gives, under the names that they have in its body."""
        given = list(tensors)
        for i, position in enumerate(self._site.tensor_positions):
            if position in self._site.known_result.mutated:
                given[i] = given[i].clone()
        with autocast_context(self._site.autocast):
            found = self._function(*given)
        outputs = tensors_of_node(self._site, found, given)
        return outputs[0] if len(outputs) == 1 else {f"output_{i}": value for i, value in enumerate(outputs)}


def _refuse_kernels(site: Site, graph: Graph) -> None:
    """Refuse a graph that calls PyTorch's kernels.

    Raises:
        UnsupportedOperatorError: it calls some; names the operators, with their lines.
    """
    kernels = kernels_said(python_op_nodes(graph.proto.graph), graph.sites)
    if kernels:
        raise UnsupportedOperatorError(
            f"{site.func_name} is not portable: ONNX has no operators for {kernels}. {WAY_OUT}"
        )
