"""Simplification of a translated graph that leaves its parameters unchanged.

Parameters and buffers are graph inputs while the graph is simplified. As initializers, equal ones
would be merged and small ones folded, and the gradient of each would be lost.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as passes
import onnxscript.optimizer
from onnxscript.rewriter import RewritePass, RewriteRule
from onnxscript.rewriter.rules import common as rules

from torch2ort.program.effect_order import has_backward, must_run
from torch2ort.symbolics.double_literals import loses_digits
from torch2ort.symbolics.element_types import typed_nodes
from torch2ort.symbolics.identity_arithmetic import NEUTRAL_NUMBER_RULES, OWN_SHAPE_RULE

_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_OWN = frozenset({"PARAMETER", "BUFFER"})

_CALL = "call"


class _RuleOf:
    """A rewrite rule for nodes of its operator; onnxscript tries each rule on each node."""

    def __init__(self, op_type: str, rule: RewriteRule) -> None:
        self._op_type, self._rule = op_type, rule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def try_rewrite(self, model: ir.Model, graph: ir.Graph, node: ir.Node, **settings: Any) -> Any:
        """Apply the rule; return ``None`` where it does not match."""
        if node.op_type != self._op_type:
            return None
        return self._rule.try_rewrite(model, graph, node, **settings)


# Only rules that remove nodes without an effect. The library's rules about numbers hold within a tolerance,
# in which 1e-8 equals 0, so these rules are torch2ort's own.
_RULES: tuple[Any, ...] = (
    _RuleOf("Cast", rules.no_op_cast_rule),
    _RuleOf("Expand", rules.no_op_expand_rule),
    _RuleOf("Transpose", rules.no_op_transpose_rule),
    _RuleOf("Transpose", rules.transpose_transpose_rule),
    _RuleOf("Unsqueeze", rules.unsqueeze_unsqueeze_rule),
    _RuleOf("Reshape", rules.reshape_reshape_rule),
    _RuleOf("Reshape", OWN_SHAPE_RULE),
    _RuleOf("Slice", rules.collapse_slice_rule),
    _RuleOf("Slice", rules.collapse_slice2_rule),
    *(_RuleOf(op_type, rule) for op_type, rule in NEUTRAL_NUMBER_RULES.items()),
)


def cleanup(model: ir.Model) -> None:
    """Inline, fold and prune ``model`` in place.

    Parameters and buffers are unchanged. Calls of Functions are kept: two equal calls are not merged, and a
    call whose result is unused is not removed.
    """
    with _own_tensors_as_inputs(model), _calls_of_their_own(model):
        _run(model, passes.InlinePass())
        _fold(model)
        if _replace_cast_like(model):
            _fold(model)
        _run(
            model,
            RewritePass(_RULES),
            passes.IdentityEliminationPass(),
            passes.RemoveUnusedNodesPass(),
        )
        with _told_apart(node for node in model.graph if _has_negative_zero(node)):
            _run(model, passes.CommonSubexpressionEliminationPass())
        _run(
            model,
            passes.RemoveUnusedFunctionsPass(),
            passes.RemoveUnusedOpsetsPass(),
        )
    _run(model, passes.NameFixPass())


def drop_unread_constants(graph: ir.Graph) -> None:
    """Remove unused initializers, since sessions warn of them. Weights are inputs at this point."""
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]


def _fold(model: ir.Model) -> None:
    with warnings.catch_warnings():
        # log(0) in a branch that is not taken needs no warning.
        warnings.simplefilter("ignore", RuntimeWarning)
        onnxscript.optimizer.fold_constants(
            model,
            onnx_shape_inference=True,
            input_size_limit=4096,
            output_size_limit=1 << 20,
            # As nodes they are assigned to PyTorch's kernels, or draw random numbers. None leaves it to the
            # limits.
            should_fold=lambda node: False if loses_digits(node) or must_run(node) else None,
        )


def _run(model: ir.Model, *steps: ir.passes.InPlacePass) -> None:
    for step in steps:
        step(model)


@contextmanager
def _own_tensors_as_inputs(model: ir.Model) -> Iterator[None]:
    graph = model.graph
    tensors: list[tuple[ir.Value, ir.TensorProtocol]] = []
    for name, value in list(graph.initializers.items()):
        if value.metadata_props.get(_KIND) in _OWN and value.const_value is not None:
            tensors.append((value, value.const_value))
            del graph.initializers[name]
            value.const_value = None
            graph.inputs.append(value)
    yield
    for value, tensor in tensors:
        graph.inputs.remove(value)
        if value.uses() or value.is_graph_output():
            value.const_value = tensor
            graph.register_initializer(value)


@contextmanager
def _calls_of_their_own(model: ir.Model) -> Iterator[None]:
    """Mark each call that :func:`must_run` names as read; it and a call with a backward equal no other node.

    The last output of a BatchNormalization in training mode is marked, too; without it the node passes for
    another.
    """
    graph = model.graph
    calls = [node for node in graph if must_run(node) or _is_by_batch(node)]
    own = len(graph.outputs)
    graph.outputs.extend(node.outputs[-1] for node in calls)
    with _told_apart(node for node in graph if has_backward(node) or must_run(node)):
        yield
    # By position, as an output of the model may have become the value that a call returns.
    while len(graph.outputs) > own:
        graph.outputs.pop()


def _is_by_batch(node: ir.Node) -> bool:
    return node.op_type == "BatchNormalization" and "training_mode" in node.attributes


@contextmanager
def _told_apart(nodes: Iterable[ir.Node]) -> Iterator[None]:
    """Mark each of ``nodes`` as different from all others."""
    apart = list(nodes)
    for number, node in enumerate(apart):
        node.attributes.add(ir.AttrInt64(_CALL, number))
    yield
    for node in apart:
        del node.attributes[_CALL]


def _has_negative_zero(node: ir.Node) -> bool:
    """Return True if an attribute is -0.0, which equals 0.0 when equal nodes are searched."""
    if _CALL in node.attributes:
        return False
    numbers: list[float] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.FLOAT and not attribute.is_ref():
            numbers.append(attribute.as_float())
        elif attribute.type == ir.AttributeType.FLOATS and not attribute.is_ref():
            numbers += attribute.as_floats()
    return any(number == 0 and math.copysign(1, number) < 0 for number in numbers)


def _replace_cast_like(model: ir.Model) -> bool:
    """Replace CastLike by Cast, or by its input. Return True if the graph contained one."""
    if not any(node.op_type == "CastLike" for node in ir.traversal.RecursiveGraphIterator(model.graph)):
        return False
    found = False
    for typed in list(typed_nodes(model)):
        node = typed.node
        if node.op_type != "CastLike" or node.graph is not model.graph:
            continue
        found = True
        source, like = node.inputs
        assert source is not None
        assert like is not None
        target = like.dtype or node.outputs[0].dtype
        assert target is not None, f"the element type of {like.name} is unknown"
        result = source
        if source.dtype != target:
            cast = ir.Node(
                "", "Cast", [source], [ir.AttrInt64("to", int(target))], num_outputs=1, name=node.name
            )
            cast.metadata_props.update(node.metadata_props)
            cast.outputs[0].dtype, cast.outputs[0].shape = target, node.outputs[0].shape
            model.graph.insert_before(node, cast)
            result = cast.outputs[0]
        ir.convenience.replace_all_uses_with(node.outputs[0], result, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
    return found
