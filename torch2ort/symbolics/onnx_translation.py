"""Translation of a prepared program into an ONNX graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import onnxscript.version_converter
import torch

from torch2ort._torch import onnx_exporter as private
from torch2ort._torch.dispatch import OpOverload
from torch2ort.errors import Torch2OrtError
from torch2ort.graph.mutation import Mutation
from torch2ort.program.kernel_sites import is_random
from torch2ort.program.mutated_inputs import add_mutation_outputs
from torch2ort.program.target import Target
from torch2ort.program.unrepresentable_tensors import refuse_complex_arguments, refuse_complex_values
from torch2ort.pythonop import Site
from torch2ort.pythonop.abstract_run.forward_probe import UserError
from torch2ort.pythonop.python_op_autograd import PYTHON_OP_GRAD
from torch2ort.symbolics.cleanup import cleanup
from torch2ort.symbolics.dtype_widening import fit_types
from torch2ort.symbolics.empty_matmul import guard_empty_matmuls
from torch2ort.symbolics.exact_marks import mark_exact
from torch2ort.symbolics.matmul_fusion_workarounds import avoid_wrong_matmul_fusions
from torch2ort.symbolics.preparation import Prepared, to_kernels
from torch2ort.symbolics.reduction_axes import count_axes_from_the_front
from torch2ort.symbolics.registered import user_operators
from torch2ort.symbolics.registered.user_gradient_ops import MAPPED_CALL, MAPPED_CALL_GRAD
from torch2ort.symbolics.translations import translation_table
from torch2ort.symbolics.translations.basics import folded_view, view

# The opset of torch.onnx's translations and of torch2ort's.
_BUILD_OPSET = 18
# The highest opset that onnxscript converts to. Later opsets only add types and attributes to operators, and
# the attributes' defaults keep the earlier behaviour (tests/symbolics/test_opsets.py).
_CONVERTED_OPSET = 25
aten = torch.ops.aten
_PYTHON_OP = torch.ops.torch2ort.python_op.default
_OPAQUE = (_PYTHON_OP, PYTHON_OP_GRAD, MAPPED_CALL, MAPPED_CALL_GRAD)
# Errors with a message for the user: torch2ort's own, and those of registered callables.
_DELIBERATE = (Torch2OrtError, UserError)

PythonOpTranslation = Callable[[list[ir.Value], str], "list[ir.Value]"]


@dataclass(frozen=True, slots=True)
class Translated:
    """An ONNX graph of a program.

    Attributes:
        model: inputs are the user's tensors in order; parameters and buffers are initializers under
            their own names; outputs are the user's in order, then one for each mutation.
        mutations: the tensors that the last outputs are written into.
        sites: internal sites behind PythonOp nodes; the caller keeps them alive.
    """

    model: ir.Model
    mutations: tuple[Mutation, ...]
    sites: tuple[Site, ...]


def translate(
    prepared: Prepared,
    target: Target,
    *,
    python_op: PythonOpTranslation,
    others: Mapping[Any, Callable[..., Any]] | None = None,
) -> Translated:
    """Translate a program that :func:`prepare` returned.

    Args:
        prepared: the program; operators that turn out to have no kernel in ONNX Runtime become calls of
            PyTorch's kernels in it.
        target: the runtime of the graph, as passed to :func:`prepare`.
        python_op: translation of ``torch.ops.torch2ort.python_op``: from graph values and the site's
            key to graph values.
        others: translations of more operators of torch2ort's own.

    Raises:
        UnsupportedOperatorError: an operator cannot be part of a graph.
    """
    program = prepared.program
    views = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
    table: dict[Any, Callable[..., Any]] = {
        # Next to kernels a view is a copy.
        **dict.fromkeys(views, view if target.is_half else folded_view),
        **translation_table(target),
    }
    calls = {**(others or {}), _PYTHON_OP: lambda inputs, site: python_op(list(inputs), site)}
    given_up: set[str] = set()
    while True:
        model, mutations = _to_onnx(prepared, target, table, calls, given_up)
        refuse_complex_values(model, program)
        cleanup(model)
        count_axes_from_the_front(model)
        unfit = _of_operators(program, fit_types(model), given_up)
        if not unfit:
            break
        _hand_over(prepared, target, unfit, given_up)
    mark_exact(model)
    avoid_wrong_matmul_fusions(model)
    guard_empty_matmuls(model)
    return Translated(model, mutations, tuple(prepared.sites))


def _to_onnx(
    prepared: Prepared,
    target: Target,
    table: Mapping[Any, Callable[..., Any]],
    calls: Mapping[Any, Callable[..., Any]],
    given_up: set[str],
) -> tuple[ir.Model, tuple[Mutation, ...]]:
    program = prepared.program
    while True:
        try:
            model = private.to_onnx(program, table, calls)
            break
        except private.ConversionError as error:
            cause = _innermost(error)
            name = private.failing_node(error)
            node = next((n for n in program.graph.nodes if n.name == name), None)
            if isinstance(cause, _DELIBERATE) or node is None or name in given_up or node.target in _OPAQUE:
                if node is not None and node.target in _OPAQUE:
                    refuse_complex_arguments(node)
                raise cause from None
            _hand_over(prepared, target, {node.name}, given_up)
    mutations = add_mutation_outputs(model, program)
    _convert(model, target.opset)
    return model, mutations


def _convert(model: ir.Model, opset: int) -> None:
    """Convert a graph to one opset; users' exporters built their nodes in it, all others are older."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if not node.domain and node.version is None:
            node.version = _BUILD_OPSET
    # A graph of PythonOp nodes alone imports no opset of ONNX itself.
    model.opset_imports[""] = _BUILD_OPSET
    if opset != _BUILD_OPSET:
        onnxscript.version_converter.convert_version(model, min(opset, _CONVERTED_OPSET))
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if not node.domain:
            node.version = opset
    model.opset_imports[""] = opset


def _innermost(error: BaseException) -> BaseException:
    while error.__cause__ is not None and not isinstance(error, _DELIBERATE):
        error = error.__cause__
    return error


def _of_operators(
    program: torch.export.ExportedProgram, found: Iterable[str], given_up: set[str]
) -> set[str]:
    """Return the FX nodes named in ``found`` that PyTorch's kernel can compute, without users' operators."""
    users = user_operators()
    nodes = {n.name: n for n in program.graph.nodes}
    own = set()
    for name in found:
        node = nodes.get(name)
        if node is not None and node.target is operator.getitem:
            node = node.args[0]
        if node is None or node.name in given_up or not isinstance(node.target, OpOverload):
            continue
        if node.target not in _OPAQUE and node.target not in users and not is_random(node):
            own.add(node.name)
    return own


def _hand_over(prepared: Prepared, target: Target, names: set[str], given_up: set[str]) -> None:
    nodes = {n.name: n for n in prepared.program.graph.nodes}
    # A node that selects one of several results is replaced by the operator that returned them.
    names = {n.args[0].name if (n := nodes[name]).target is operator.getitem else name for name in names}
    given_up |= names
    to_kernels(prepared, target, lambda node: node.name in names and not is_random(node))
