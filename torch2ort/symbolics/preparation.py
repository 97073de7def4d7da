"""Preparation of a program from torch.export for translation and training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from torch2ort._torch import decompositions as private
from torch2ort._torch.decompositions import HigherOrderOperator, OpOverload
from torch2ort._torch.onnx_exporter import has_translation, registry, sync_output_names
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.kernels.functions import decode_call
from torch2ort.kernels.index_check import decode_check
from torch2ort.kernels.recurrent import restore
from torch2ort.program import internal_ops
from torch2ort.program.aten_fallback_policy import (
    DECOMPOSED,
    NOT_DECOMPOSED,
    OVER_FIXED_SIZES,
    is_plain_in_files,
    wants_kernel,
)
from torch2ort.program.decompose_nodes import decompose_nodes
from torch2ort.program.decomposition_overrides import eager_kernels
from torch2ort.program.dtype_mismatch import refuse_mixed_dtypes
from torch2ort.program.fft_precision import refuse_inexact_transforms
from torch2ort.program.full_overwrites import keep_overwritten
from torch2ort.program.fuse_gelu import fuse_gelu
from torch2ort.program.half_precision import not_decomposed_in_half, round_compared_numbers, rounds_in_half
from torch2ort.program.index_checks import check_indices
from torch2ort.program.inline_autograd_functions import inline_calls
from torch2ort.program.integer_clamp import normalize_clamp_bounds
from torch2ort.program.keep_raising_ops import keep_unread_checks
from torch2ort.program.kernel_sites import SiteMaker, is_operator
from torch2ort.program.mutated_inputs import refuse_effects, refuse_other_mutations
from torch2ort.program.no_grad_regions import inline_grad_regions
from torch2ort.program.plain_results import drop_plain, plain_results
from torch2ort.program.recurrent_layers import separate_layers
from torch2ort.program.runtime_assertions import drop_conditions
from torch2ort.program.scalar_overflow import wrap_scalars
from torch2ort.program.strides import (
    draw_in_order_of_memory,
    loosen_views,
    read_in_order_of_memory,
    read_off_shapes,
    refuse_other_orders,
    refuse_shared_elements,
    refuse_unreadable_memory,
)
from torch2ort.program.target import Target
from torch2ort.program.tensor_index_select import select_by_tensors
from torch2ort.program.unrepresentable_tensors import refuse_unrepresentable, refuse_unrepresentable_weights
from torch2ort.program.unsupported_custom_ops import refuse_unsupported_custom_ops
from torch2ort.program.untracked_inplace import refuse_hidden_writes
from torch2ort.pythonop import Site
from torch2ort.pythonop.python_op_autograd import PYTHON_OP_GRAD
from torch2ort.sizes.unbacked_sizes import expands_unknown, forget_new_sizes
from torch2ort.support.provenance import source_line
from torch2ort.symbolics.decompositions import EVERY, EXPORTED
from torch2ort.symbolics.registered import user_operators
from torch2ort.symbolics.registered.user_gradient_ops import MAPPED_CALL, MAPPED_CALL_GRAD
from torch2ort.symbolics.translations import translation_table

aten = torch.ops.aten
_OPAQUE = frozenset({torch.ops.torch2ort.python_op.default, PYTHON_OP_GRAD, MAPPED_CALL, MAPPED_CALL_GRAD})


@dataclass(frozen=True, slots=True)
class Prepared:
    """A program that can be translated.

    Attributes:
        program: the program.
        sites: sites of its calls of PyTorch's kernels, which only this list keeps alive; translation adds
            some.
    """

    program: torch.export.ExportedProgram
    sites: list[Site] = field(default_factory=list)


def check(program: torch.export.ExportedProgram, target: Target) -> None:
    """Refuse operators that no graph computes as eager does, and inline regions without gradient.

    Args:
        program: the result of ``torch.export.export``; it is changed.
        target: the runtime of the graph.

    Raises:
        UnsupportedOperatorError: an operator cannot be part of a graph; the message names it, its line in
            the model, and what to do.
        DtypeError: eager PyTorch would refuse the dtypes of an operator's tensors.
    """
    _refuse_guessed_sizes(program)
    if target.has_libraries:
        refuse_unsupported_custom_ops(program.graph_module, user_operators())
    refuse_mixed_dtypes(program)
    refuse_unrepresentable_weights(program)
    inline_grad_regions(program.graph_module)
    refuse_shared_elements(program.graph_module.graph)
    draw_in_order_of_memory(program.graph_module.graph)
    if target.is_trained:
        refuse_effects(program.graph_module.graph)
        refuse_hidden_writes(program.graph_module.graph)
        refuse_unreadable_memory(program.graph_module.graph)


def prepare(program: torch.export.ExportedProgram, target: Target) -> Prepared:
    """Rewrite a program so that every operator of it can be translated.

    Regions without gradient keep that property, writes in place become functional and outputs of the graph,
    random numbers come from PyTorch's generator in the program's order, and operators without an exact
    translation run in PyTorch's kernels.

    Args:
        program: the result of ``torch.export.export``; it is changed.
        target: the runtime of the graph.

    Raises:
        UnsupportedOperatorError: an operator cannot be part of a graph; the message names it, its line in
            the model, and what to do.
        DtypeError: eager PyTorch would refuse the dtypes of an operator's tensors, or bounds for one.
    """
    check(program, target)
    users = user_operators()
    if not target.is_half:
        inline_calls(program.graph_module, every=target.inlines_functions)
    if target.is_exported:
        separate_layers(program.graph_module.graph)
    if target.is_trained:
        keep_overwritten(program.graph_module.graph)
    normalize_clamp_bounds(program.graph_module.graph)
    wrap_scalars(program.graph_module.graph)
    fuse_gelu(program.graph_module, in_half=not target.rounds_as_eager)
    if not target.is_half:
        select_by_tensors(program.graph_module.graph)
        keep_unread_checks(program.graph_module.graph, program)
    check_indices(program)
    read_in_order_of_memory(program)
    if not target.is_half:
        loosen_views(program)
    varying = _varying_sizes(program)
    # Passes that ran an operator without data to find its types created sizes that are in no graph.
    forget_new_sizes(program.graph)
    program = _decomposed(program, target, users)
    _refuse_fixed_sizes(varying, _varying_sizes(program))
    drop_conditions(program.graph)
    _write_default_dtypes(program.graph)
    round_compared_numbers(program.graph)
    read_off_shapes(program.graph)
    refuse_other_orders(program)
    restore(program, users)
    refuse_other_mutations(program)
    _refuse_subgraphs(program)
    refuse_unrepresentable(program)
    refuse_inexact_transforms(program.graph)
    prepared = Prepared(program)
    to_kernels(prepared, target, _needs_kernel(program, target))
    return prepared


def _decomposed(
    program: torch.export.ExportedProgram, target: Target, users: frozenset[OpOverload]
) -> torch.export.ExportedProgram:
    """Decompose operators that neither ONNX nor PyTorch's kernels compute as a whole, except ``users``."""
    own = target.gradients.decompositions(EVERY | EXPORTED if target.is_exported else dict(EVERY))
    decompositions = private.decomposition_table(
        translation_table(target),
        {operator: function for operator, function in own.items() if operator not in users},
        not_decomposed_in_half if target.rounds_as_eager else dict,
        decomposed=DECOMPOSED - users,
        not_decomposed=(NOT_DECOMPOSED | target.gradients.not_decomposed) - users,
        over_fixed_sizes=OVER_FIXED_SIZES,
        # Autograd has differentiated the whole operators, so they are not decomposed any more.
        composites_only=target.is_half and target.has_kernels,
    )
    if target.is_half:
        decompose_nodes(program, decompositions)
        return program
    keeps_kernels = target.rounds_as_eager and target.has_kernels
    with eager_kernels() if keeps_kernels else contextlib.nullcontext():
        return private.decompose(program, decompositions)


def _varying_sizes(program: torch.export.ExportedProgram) -> dict[tuple[int, int], tuple[str, str]]:
    """Return position and dimension of each varying size of an input -> the input's name, its expression."""
    signature = program.graph_signature
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    inputs = [str(name) for name in signature.user_inputs]
    return {
        (position, d): (name, str(size))
        for position, name in enumerate(inputs)
        if name in nodes
        for d, size in enumerate(nodes[name].meta["val"].shape)
        if not isinstance(size, int)
    }


def _refuse_guessed_sizes(program: torch.export.ExportedProgram) -> None:
    """Refuse an ``expand`` to a size that only values determine, which the graph would lack."""
    node = expands_unknown(program)
    if node is not None:
        raise UnsupportedOperatorError(
            f"the model expands at {source_line(node)} a tensor of which a size is known in a run only, "
            f"where it may be 1 or not, and a graph is for one of the two. If a Function gives that "
            f"tensor, say its sizes with torch2ort.register_shape_inferer; else put this into a Function"
        )


def _refuse_fixed_sizes(
    before: dict[tuple[int, int], tuple[str, str]], after: dict[tuple[int, int], tuple[str, str]]
) -> None:
    """Refuse a decomposition that holds only for some of the sizes that the program was traced for."""
    left = {key: expression for key, (_, expression) in after.items()}
    for key, (name, expression) in before.items():
        same = [k for k, (_, e) in before.items() if left.get(k) == left.get(key) and e != expression]
        if key not in left or same:
            raise UnsupportedOperatorError(
                f"an operator of the model can be translated for one size of dimension {key[1]} of {name} "
                f"only, which was to vary. Export with that size fixed, or compile with dynamic=False"
            )


def _write_default_dtypes(graph: torch.fx.Graph) -> None:
    """Set the dtype from the trace on each call that makes a tensor from sizes or numbers.

    torch.onnx uses ``float32`` where a call names none, whatever ``torch.set_default_dtype`` was called with.

    Args:
        graph: a program's nodes; changed in place.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        if not is_operator(node) or not isinstance(value, torch.Tensor):
            continue
        arguments = node.target._schema.arguments
        if any(str(argument.type) == "Tensor" for argument in arguments):
            continue
        if any(argument.name == "dtype" and argument.kwarg_only for argument in arguments):
            node.kwargs = {**node.kwargs, "dtype": value.dtype}


def to_kernels(prepared: Prepared, target: Target, chosen: Callable[[torch.fx.Node], bool]) -> None:
    """Replace each chosen node of a program by a call of PyTorch's kernel, in the order of the program."""
    program = prepared.program
    if not target.has_kernels:
        _refuse_kernels(program, chosen)
        return
    maker = SiteMaker(program.graph_module.graph, has_libraries=target.has_libraries)
    plain_for = _plain_for(program, target)
    with private.symbolic_resizes():
        for node in list(program.graph_module.graph.nodes):
            if node.op == "call_function" and node.target is not internal_ops.checked_index and chosen(node):
                if drop_plain(node):
                    continue
                _drop_own_checks(node)
                maker.replace(node, plain=plain_for(node))
            else:
                maker.record_unreplaced(node)
        for node in list(program.graph_module.graph.nodes) if target.is_half else ():
            if node.target is internal_ops.checked_index:
                maker.replace(node)
    prepared.sites.extend(maker.sites)
    if maker.sites:
        _forget_strides(program)
        sync_output_names(program)
        program.graph_module.graph.lint()


def _plain_for(
    program: torch.export.ExportedProgram, target: Target
) -> Callable[[torch.fx.Node], list[torch.fx.Node] | None]:
    """Return a function from a node to the nodes whose results files use in place of a kernel's."""
    if not target.is_exported:
        return lambda node: None
    table = translation_table(target)
    known, decompositions = registry(table), private.plain_decompositions(table)

    def plain(node: torch.fx.Node) -> list[torch.fx.Node] | None:
        if not is_plain_in_files(node):
            return None
        return plain_results(program, node, lambda part: has_translation(part, known), decompositions)

    return plain


def _refuse_kernels(program: torch.export.ExportedProgram, chosen: Callable[[torch.fx.Node], bool]) -> None:
    """Refuse operators that need PyTorch's kernels, in a graph that runs without them."""
    for node in program.graph_module.graph.nodes:
        if node.op == "call_function" and node.target is not internal_ops.checked_index and chosen(node):
            is_double = _is_double(node)
            raise UnsupportedOperatorError(
                f"{node.target} at {source_line(node)} has no exact translation to ONNX's own operators"
                f"{' in torch.float64' if is_double else ''}, and a file of a training step runs without "
                f"PyTorch. {'Convert the model with model.float(), write' if is_double else 'Write'} it with "
                f"others, or register a translation with torch2ort.register_symbolic"
            )


def _is_double(node: torch.fx.Node) -> bool:
    """Return True if ``node`` computes in double, for which onnxruntime has fewer kernels."""
    values = (n.meta.get("val") for n in (node, *node.all_input_nodes))
    return any(isinstance(value, torch.Tensor) and value.dtype == torch.float64 for value in values)


def _drop_own_checks(node: torch.fx.Node) -> None:
    """Remove checks that PyTorch's kernel makes itself."""
    for index in list(node.all_input_nodes):
        if index.target is not internal_ops.checked_index:
            continue
        source, _, text = index.args
        if decode_call(decode_check(str(text)).call).operator is node.target:
            assert isinstance(source, torch.fx.Node)
            node.replace_input_with(index, source)
            if not index.users:
                node.graph.erase_node(index)


def _forget_strides(program: torch.export.ExportedProgram) -> None:
    """Replace views by reshapes, as a site makes a kernel's result contiguous in its memory layout."""
    for node in program.graph_module.graph.nodes:
        if node.target is aten.view.default:
            node.target = aten.reshape.default


def _needs_kernel(program: torch.export.ExportedProgram, target: Target) -> Callable[[torch.fx.Node], bool]:
    known = registry(translation_table(target))
    users = user_operators()

    def chosen(node: torch.fx.Node) -> bool:
        if node.target in _OPAQUE or not isinstance(node.target, OpOverload):
            return False
        own = node.target in users or node.target in target.translations
        if not own and wants_kernel(node):
            return True
        if node.target not in users and target.rounds_as_eager and rounds_in_half(node):
            return True
        return not has_translation(node, known) or target.gradients.needs_kernel(node)

    return chosen


def _refuse_subgraphs(program: torch.export.ExportedProgram) -> None:
    """Refuse operators with subgraphs, which a graph cannot represent."""
    for node in program.graph_module.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, HigherOrderOperator):
            raise UnsupportedOperatorError(
                f"{node.target} at {source_line(node)} cannot be put into an ONNX graph that is trained. "
                f"Compute both branches and choose with torch.where, or unroll the loop"
            )
