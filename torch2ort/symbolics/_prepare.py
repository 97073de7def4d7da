"""From a program as torch.export gives it to one that can be translated and trained."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

from torch2ort.errors import UnsupportedOperatorError
from torch2ort.kernels.functions import decode_call
from torch2ort.kernels.index_check import decode_check
from torch2ort.kernels.recurrent import restore
from torch2ort.pythonop import Site
from torch2ort.symbolics import _torch_private as private
from torch2ort.symbolics import operators
from torch2ort.symbolics._torch_private import HigherOrderOperator, OpOverload
from torch2ort.symbolics.decompositions import decomposition_table
from torch2ort.symbolics.dtypes import refuse_mixed_dtypes
from torch2ort.symbolics.fusion import fuse_gelu
from torch2ort.symbolics.grad_regions import inline_grad_regions
from torch2ort.symbolics.gradients import requires_grad
from torch2ort.symbolics.hidden_writes import refuse_hidden_writes
from torch2ort.symbolics.indices import check_indices
from torch2ort.symbolics.mutation import refuse_other_mutations
from torch2ort.symbolics.policy import (
    DECOMPOSED,
    WHOLE,
    WHOLE_IN_TRAINING,
    is_better_in_pytorch,
    wants_kernel,
)
from torch2ort.symbolics.registered import user_operators
from torch2ort.symbolics.sites import SiteMaker, arguments_of
from torch2ort.symbolics.source import source_line
from torch2ort.symbolics.strides import loosen_views, refuse_other_strides
from torch2ort.symbolics.target import Target
from torch2ort.symbolics.translations import translation_table

aten = torch.ops.aten
_PYTHON_OP = torch.ops.torch2ort.python_op.default
_HALF = frozenset({torch.float16, torch.bfloat16})
_CASTS = frozenset({"_to_copy", "to", "convert_element_type", "detach", "clone"})


class Notes:
    """What translation must know of a prepared program and cannot read from its graph.

    Attributes:
        sites: internal sites, kept alive here.
        training: whether the graph will be differentiated.
    """

    def __init__(self, *, training: bool) -> None:
        self.sites: list[Site] = []
        self.training = training


_notes: weakref.WeakKeyDictionary[torch.export.ExportedProgram, Notes] = weakref.WeakKeyDictionary()


def notes_of(program: torch.export.ExportedProgram) -> Notes:
    """The notes that :func:`prepare` made of ``program``."""
    return _notes[program]


def prepare(program: torch.export.ExportedProgram, target: Target) -> torch.export.ExportedProgram:
    """Rewrite a program so that every operator of it can be translated and differentiated.

    Regions without gradient keep that property, what is written in place becomes functional and an
    output, random numbers come from PyTorch's generator in the program's order, and operators that
    onnxruntime-training would differentiate wrongly run in PyTorch's kernels.

    Args:
        program: what ``torch.export.export`` gave; it is changed.
        target: what the graph is for.

    Raises:
        UnsupportedOperatorError: an operator fits into no graph; the message names it, its line in
            the model, and what to do.
        DtypeError: eager PyTorch would refuse the dtypes of an operator's tensors.
    """
    training = target.differentiates
    notes = Notes(training=training)
    refuse_mixed_dtypes(program)
    inline_grad_regions(program.graph_module)
    if training:
        refuse_hidden_writes(program.graph_module.graph)
    fuse_gelu(program.graph_module)
    check_indices(program)
    refuse_other_strides(program)
    loosen_views(program)
    varying = _varying_sizes(program)
    users = user_operators()
    decompositions = decomposition_table(training=training)
    program = private.decompose(
        program,
        translation_table(),
        {operator: function for operator, function in decompositions.items() if operator not in users},
        decomposed=DECOMPOSED - users,
        whole=(WHOLE | WHOLE_IN_TRAINING if training else WHOLE) - users,
        training=training,
    )
    _refuse_fixed_sizes(varying, _varying_sizes(program))
    restore(program, users)
    refuse_other_mutations(program)
    _refuse_unrepresentable(program, training=training)
    to_kernels(program, notes, _needs_kernel(program, training=training))
    _notes[program] = notes
    return program


def _varying_sizes(program: torch.export.ExportedProgram) -> dict[tuple[str, int], str]:
    """Name and dimension of each size of an input that varies -> its expression."""
    signature = program.graph_signature
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    shapes = {str(name): nodes[name].meta["val"].shape for name in signature.user_inputs if name in nodes}
    return {
        (name, d): str(size)
        for name, shape in shapes.items()
        for d, size in enumerate(shape)
        if not isinstance(size, int)
    }


def _refuse_fixed_sizes(before: dict[tuple[str, int], str], after: dict[tuple[str, int], str]) -> None:
    """Refuse a decomposition that holds for some of the sizes only that the program was traced for."""
    for key, expression in before.items():
        same = [k for k, e in before.items() if after.get(k) == after.get(key) and e != expression]
        if key not in after or same:
            name, dimension = key
            raise UnsupportedOperatorError(
                f"an operator of the model can be translated for one size of dimension {dimension} of {name} "
                f"only, which was to vary. Export with that size fixed"
            )


def to_kernels(
    program: torch.export.ExportedProgram, notes: Notes, chosen: Callable[[torch.fx.Node], bool]
) -> None:
    """Give each chosen node of ``program`` to PyTorch's kernel, in the order of the program."""
    maker = SiteMaker(program, training=notes.training)
    for node in list(program.graph_module.graph.nodes):
        if node.op == "call_function" and node.target is not operators.checked_index and chosen(node):
            _drop_own_checks(node)
            maker.replace(node)
        else:
            maker.passes_by(node)
    for node in list(program.graph_module.graph.nodes) if notes.training else ():
        if node.target is operators.checked_index:
            maker.replace(node)
    notes.sites += maker.sites
    if maker.sites:
        _forget_strides(program)
        private.sync_output_names(program)
        program.graph_module.graph.lint()
        program.graph_module.recompile()


def _drop_own_checks(node: torch.fx.Node) -> None:
    """Take away checks that PyTorch's kernel makes itself."""
    for index in list(node.all_input_nodes):
        if index.target is not operators.checked_index:
            continue
        source, _, text = index.args
        if decode_call(decode_check(str(text)).call).operator is node.target:
            assert isinstance(source, torch.fx.Node)
            node.replace_input_with(index, source)
            if not index.users:
                node.graph.erase_node(index)


def _forget_strides(program: torch.export.ExportedProgram) -> None:
    """Make views copies: what a kernel returned in another order of memory leaves its site contiguous."""
    for node in program.graph_module.graph.nodes:
        if node.target is aten.view.default:
            node.target = aten.reshape.default


def _needs_kernel(
    program: torch.export.ExportedProgram, *, training: bool
) -> Callable[[torch.fx.Node], bool]:
    known = private.registry(translation_table())
    users = user_operators()
    gradient = requires_grad(program) if training else frozenset()

    def chosen(node: torch.fx.Node) -> bool:
        if node.target is _PYTHON_OP or not isinstance(node.target, OpOverload):
            return False
        wanted = node.target not in users and wants_kernel(node, training=training)
        if wanted or not private.has_translation(node, known):
            return True
        if node in gradient and (_is_empty(node) or is_better_in_pytorch(node, gradient)):
            return True
        # What is not differentiated may compute in half precision, which ONNX Runtime has few kernels for.
        return training and _computes_in_half(node)

    return chosen


def _dtypes(node: torch.fx.Node) -> set[torch.dtype]:
    """Floating-point types among what ``node`` takes and gives."""
    values: list[object] = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    flat: Iterable[object] = (
        v for value in values for v in (value if isinstance(value, (list, tuple)) else [value])
    )
    return {
        v.dtype
        for v in flat
        if isinstance(v, torch.Tensor) and (v.dtype.is_floating_point or v.dtype.is_complex)
    }


def _is_empty(node: torch.fx.Node) -> bool:
    """Whether ``node`` takes or gives a tensor without elements, which many gradient kernels divide by."""
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    return any(
        isinstance(v, torch.Tensor) and any(isinstance(d, int) and d == 0 for d in v.shape) for v in values
    )


def _computes_in_half(node: torch.fx.Node) -> bool:
    """Whether ``node`` computes in half precision, and does not just convert to or from it."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or schema.name.rpartition("::")[2] in _CASTS:
        return False
    return not _HALF.isdisjoint(_dtypes(node))


def _has_sparse_gradient(node: torch.fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and arguments_of(node).get("sparse") is True


def _half_name(node: torch.fx.Node) -> str:
    return str(next(iter(_dtypes(node) & _HALF)))


def _refuse_unrepresentable(program: torch.export.ExportedProgram, *, training: bool) -> None:
    """Refuse what a graph cannot hold: subgraphs and, in training, complex and half numbers."""
    gradient = requires_grad(program) if training else frozenset()
    for node in program.graph_module.graph.nodes:
        if node in gradient and _has_sparse_gradient(node):
            raise UnsupportedOperatorError(
                f"{node.target} at {source_line(node)} has sparse=True, but the gradients of a graph are "
                f"dense. Make the table with sparse=False, or put the look-up into a torch.autograd.Function"
            )
        if node in gradient and any(d.is_complex for d in _dtypes(node)):
            raise UnsupportedOperatorError(
                f"{node.target} at {source_line(node)} computes with complex numbers, which an ONNX graph "
                f"that is trained cannot hold. Put the complex part of the model into a "
                f"torch.autograd.Function, which keeps PyTorch's kernels"
            )
        if node in gradient and _computes_in_half(node):
            raise UnsupportedOperatorError(
                f"{node.target} at {source_line(node)} computes with {_half_name(node)}, of which "
                f"onnxruntime-training cannot add up gradients on CPU. Train in float32, or put the part of "
                f"the model in lower precision into a torch.autograd.Function; where no gradients are "
                f"wanted, call the model under torch.no_grad()"
            )
        if node.op == "call_function" and isinstance(node.target, HigherOrderOperator):
            raise UnsupportedOperatorError(
                f"{node.target} at {source_line(node)} cannot be put into an ONNX graph that is trained. "
                f"Compute both branches and choose with torch.where, or unroll the loop"
            )
