"""Inlining of Functions into the joint graph, forward and backward.

The joint graph has one opaque operator for each call of a Function, and one for its backward. Where the user
asks for it, the operators that PyTorch traces of the Function replace them. The derivative is the Function's
own backward, not that of its forward's operators.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from torch2ort._torch import aot as private
from torch2ort.differentiate.joint_trace import Joint
from torch2ort.differentiate.symbolic_shapes import settle_sizes
from torch2ort.kernels.functions import is_callable
from torch2ort.kernels.meta_dtype_fixes import fix_fake_dtypes
from torch2ort.program.decomposition_overrides import eager_formulas
from torch2ort.program.inline_autograd_functions import (
    NotInlinedError,
    applied,
    is_chosen,
    refuse_random,
    refuse_to_inline,
)
from torch2ort.program.node_dependencies import ancestors, dependent_on
from torch2ort.pythonop import TENSOR, Site, site_by_key
from torch2ort.pythonop.interception import suspended
from torch2ort.pythonop.python_op_autograd import DIFFERENTIABLE_PYTHON_OP, PYTHON_OP_GRAD
from torch2ort.pythonop.site import needed_inputs
from torch2ort.support.provenance import origin_of

# Types of constants that are equal if their texts are.
_SIMPLE = (bool, int, float, str)


@dataclass(frozen=True)
class _Traced:
    """The operators of one call of a Function.

    Attributes:
        graph: the graph of forward and backward.
        inputs: placeholder of each tensor argument of the call.
        tangent: placeholder of the output's gradient; ``None`` if no backward was requested.
        output: the result of forward.
        gradients: the gradient of each argument that needs one.
    """

    graph: torch.fx.Graph
    inputs: tuple[torch.fx.Node, ...]
    tangent: torch.fx.Node | None
    output: torch.fx.Node
    gradients: tuple[torch.fx.Node, ...]


def inline(joint: Joint, *, every: bool = False) -> Joint:
    """Replace calls of Functions by their operators.

    Args:
        joint: the joint graph; changed in place.
        every: inline each Function that can be inlined, not only those that are registered.

    Returns:
        The changed joint graph.

    Raises:
        ExportError: a registered Function cannot be inlined.
    """
    graph = joint.graph_module.graph
    backwards = {node.args[2]: node for node in graph.find_nodes(op="call_function", target=PYTHON_OP_GRAD)}
    known: dict[Any, _Traced] = {}
    became: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=DIFFERENTIABLE_PYTHON_OP):
        site = site_by_key(str(node.args[1]))
        if not is_chosen(site, every=every):
            continue
        values = [n.meta["val"] for n in node.args[0]]
        key = _identity(site, values)
        try:
            traced = known.get(key) or _traced(site, values)
        except NotInlinedError as reason:
            reason.settle(site)
            continue
        if key is not None:
            known[key] = traced
        became.update(_replace(node, backwards.get(site.key), traced))
    if not became:
        return joint
    graph.lint()
    return replace(
        joint,
        outputs=tuple(became.get(node, node) for node in joint.outputs),
        written={i: became.get(node, node) for i, node in joint.written.items()},
        gradients={i: became.get(node, node) for i, node in joint.gradients.items()},
    )


def _identity(site: Site, values: Sequence[torch.Tensor]) -> Any:
    """Return a key that is equal for calls with equal traces; ``None`` where that cannot be determined."""
    constants = [value for value in site.arguments if value is not TENSOR]
    sizes = [size for value in values for size in value.shape]
    if not all(value is None or type(value) in _SIMPLE for value in constants):
        return None
    if not all(type(size) is int for size in sizes):
        return None
    given = tuple((value.dtype, tuple(value.shape)) for value in values)
    return site.function, repr(site.arguments), site.needs_input_grad, given


def _traced(site: Site, values: Sequence[torch.Tensor]) -> _Traced:
    """Trace the operators of a call.

    Raises:
        NotInlinedError: the operators do not represent all that the call does.
    """
    refuse_to_inline(site)
    if site.known_result.outputs != (TENSOR,):
        raise NotInlinedError("it does not return one tensor alone")
    mode = next(v.fake_mode for v in values if isinstance(v, private.FakeTensor))
    differentiable = site.known_result.tensors[0].dtype.is_floating_point and any(site.needs_input_grad)
    needed = needed_inputs(site) if differentiable else ()
    with applied(site) as call, suspended(), torch.enable_grad():
        with mode:
            arguments = [
                torch.empty(v.shape, dtype=v.dtype, device=v.device).requires_grad_(i in needed)
                for i, v in enumerate(values)
            ]
        with eager_formulas(has_kernels=True):
            graph_module = private.joint_graph(_Called(call), arguments, mode)
    settle_sizes(graph_module.graph)
    fix_fake_dtypes(graph_module.graph)
    traced = _described(graph_module.graph, len(values), needed)
    for node in traced.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            if not (isinstance(node.target, private.OpOverload) and is_callable(node.target)):
                raise NotInlinedError(f"it calls {node.target}, which is no operator of ATen's")
            refuse_random(node)
        elif node.op not in ("placeholder", "output", "call_function"):
            raise NotInlinedError("it reads tensors that are none of its arguments")
    return traced


class _Called(torch.nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call

    def forward(self, *tensors: torch.Tensor) -> Any:
        result = self._call(*tensors)
        return result[0] if isinstance(result, tuple) else result


def _described(graph: torch.fx.Graph, count: int, needed: Sequence[int]) -> _Traced:
    """Return a traced call, by the descriptors of its placeholders and results.

    Raises:
        NotInlinedError: a gradient is missing, or does not depend on the output's gradient.
    """
    inputs: dict[int, torch.fx.Node] = {}
    tangent = None
    for node in graph.find_nodes(op="placeholder"):
        position = private.input_position(node.meta["desc"])
        if position is not None:
            inputs[position] = node
        elif private.tangent_of(node.meta["desc"]) is not None:
            tangent = node
        else:
            raise NotInlinedError("its forward writes to an argument")
    result = graph.output_node()
    found: dict[tuple[str, int], torch.fx.Node] = {}
    for node, description in zip(cast("list[Any]", result.args[0]), result.meta["desc"], strict=True):
        for kind, read in (("output", private.output_position), ("gradient", private.gradient_of_input)):
            position = read(description)
            if position is not None and isinstance(node, torch.fx.Node):
                found[kind, position] = node
    if ("output", 0) not in found:
        raise NotInlinedError("its forward does not return one tensor alone")
    if needed and tangent is None:
        raise NotInlinedError("no gradient arrives at its backward")
    missing = [i for i in needed if ("gradient", i) not in found]
    if missing:
        raise NotInlinedError(f"its backward returns None for tensor {missing[0]}, which needs a gradient")
    gradients = tuple(found["gradient", i] for i in needed)
    arriving = () if tangent is None else (tangent,)
    if not dependent_on(graph, arriving).issuperset(gradients):
        raise NotInlinedError("its backward returns a gradient that does not depend on the one that arrives")
    ordered = tuple(inputs[i] for i in range(count))
    return _Traced(graph, ordered, tangent, found["output", 0], gradients)


def _replace(
    call: torch.fx.Node, backward: torch.fx.Node | None, traced: _Traced
) -> dict[torch.fx.Node, torch.fx.Node]:
    """Replace a call by its operators, and the call of its backward by those of backward.

    Returns:
        Map of removed nodes to the nodes that replace them.
    """
    graph = call.graph
    values = dict(zip(traced.inputs, cast("list[torch.fx.Node]", call.args[0]), strict=True))
    _copy(traced, [traced.output], call, values)
    became = {user: values[traced.output] for user in call.users if user.args[1] == 0}
    gone = [*call.users, call]
    if backward is not None:
        (arriving,) = cast("list[torch.fx.Node]", backward.args[1])
        assert traced.tangent is not None
        values[traced.tangent] = became.get(arriving, arriving)
        _copy(traced, traced.gradients, backward, values)
        became.update((user, values[traced.gradients[cast(int, user.args[1])]]) for user in backward.users)
        gone = [*backward.users, backward, *gone]
    for node, instead in became.items():
        node.replace_all_uses_with(instead)
    for node in gone:
        graph.erase_node(node)
    return became


def _copy(
    traced: _Traced,
    results: Sequence[torch.fx.Node],
    place: torch.fx.Node,
    values: dict[torch.fx.Node, torch.fx.Node],
) -> None:
    """Copy the nodes that ``results`` depend on, unless ``values`` has them, to before ``place``."""
    wanted = ancestors(results, stop=values) - values.keys()
    with place.graph.inserting_before(place):
        for node in traced.graph.nodes:
            if node in wanted:
                made = values[node] = place.graph.node_copy(node, values.__getitem__)
                made.meta = {**origin_of(place), "val": node.meta["val"]}
