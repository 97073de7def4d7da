"""Private names of torch's decompositions and operators, and the versions tried.

| name | tried on |
| --- | --- |
| torch._ops.OpOverload, HigherOrderOperator, OpOverload._schema, OpOverload._can_decompose | 2.11-2.15.0 |
| torch._C._dispatch_has_kernel_for_dispatch_key | 2.11-2.15.0 |
| OpOverload.py_kernels, _dispatch_cache, and torch._refs, which fills the former | 2.11-2.15.0 |
| torch._decomp.decompositions.upsample_compute_output_size | 2.11-2.15.0 |
| torch.fx.experimental._config | 2.11-2.15.0 |
| torch._inductor.config.fallback_random | 2.11-2.15.0 |
| torch._export.utils: how composites are collected, see ``_composites`` | 2.11-2.15.0 |
| torch.export.exported_program: how composites are overridden, see ``_overridden`` | 2.11-2.15.0 |
| torch._higher_order_ops.utils.autograd_not_implemented | 2.11-2.15.0 |
| torch._subclasses.fake_impls: rules of composites for fake tensors | 2.11-2.15.0 |
| torch._C._jit_get_all_schemas | 2.13.0 |
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torch2ort._torch.fake_tensors import FakeTensorMode, sizes_of_zero
from torch2ort._torch.onnx_exporter import Table, number_of_operators, untranslated
from torch2ort.errors import ExportError
from torch2ort.support.replaced import replaced
from torch2ort.support.versions import need, private_names

with private_names("torch"):
    import torch._refs.nn.functional
    from torch._decomp.decompositions import upsample_compute_output_size
    from torch._export import utils as _export_utils
    from torch._higher_order_ops.utils import autograd_not_implemented
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket
    from torch._subclasses.fake_impls import (
        _deregister_op_impl,
        _is_op_registered_to_fake_rule,
        register_op_impl,
    )
    from torch.export import decomp_utils, exported_program
    from torch.fx.experimental import _config

    need(torch._C, "_dispatch_has_kernel_for_dispatch_key")
    need(OpOverload, "_schema", "_can_decompose", "py_kernels", "_dispatch_cache", "_overloadname")
    need(_export_utils, "_collect_all_valid_cia_ops", "_get_decomp_for_cia", "_materialize_cpp_cia_ops")
    need(_export_utils, "_is_preservable_cia_op")
    need(decomp_utils, "_collect_all_valid_cia_ops")
    need(exported_program, "_collect_all_valid_cia_ops", "_override_composite_implicit_decomp")
    need(exported_program, "_AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE", "_BACKEND_KEYS_TO_OVERRIDE")
    need(_config, "patch", "backed_size_oblivious")


@contextmanager
def _composites_found_once() -> Iterator[None]:
    """Let torch.export find all composites once, and set the kernels of each directly.

    torch queries the dispatcher for them again for each of some thirty namespaces, three times a program,
    and sets fifteen kernels of each of hundreds of them through a decorator that records its type. That is
    most of the time of a small program. The composites found and the kernels set are the same. The caller
    ensures that one thread at a time enters.
    """
    found = functools.cache(_composites)
    with (
        replaced(exported_program, _collect_all_valid_cia_ops=found),
        replaced(decomp_utils, _collect_all_valid_cia_ops=found),
        replaced(exported_program, _override_composite_implicit_decomp=_overridden),
    ):
        yield


def _composites() -> set[Any]:
    """Return all composites, with one query of the dispatcher instead of one for each namespace."""
    _export_utils._materialize_cpp_cia_ops()
    with replaced(_export_utils, _materialize_cpp_cia_ops=lambda: None):
        return _export_utils._collect_all_valid_cia_ops()


@contextmanager
def _overridden(composites: Mapping[OpOverload, Callable[..., Any]]) -> Iterator[None]:
    """Do the work of torch.export.exported_program._override_composite_implicit_decomp."""
    before = {composite: composite.py_kernels.copy() for composite in composites}
    for composite, decomposition in composites.items():
        _override(composite, decomposition)
    try:
        yield
    finally:
        for composite, kernels in before.items():
            composite.py_kernels.clear()
            composite.py_kernels.update(kernels)
            composite._dispatch_cache.clear()
            _deregister_op_impl(composite)


def _override(composite: OpOverload, decomposition: Callable[..., Any]) -> None:
    kernels = composite.py_kernels
    refusal = autograd_not_implemented(composite, deferred_error=True)
    for key in exported_program._AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE:
        kernels.setdefault(key, refusal)
    own = _export_utils._get_decomp_for_cia(composite)
    kernels[torch._C.DispatchKey.CompositeImplicitAutograd] = decomposition
    if not _is_op_registered_to_fake_rule(composite):
        register_op_impl(composite)(functools.partial(_as_it_was, own))
    for key in exported_program._BACKEND_KEYS_TO_OVERRIDE:
        kernels.setdefault(key, own)
    composite._dispatch_cache.clear()


_FORMULA_KEYS = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
# They write running statistics, which their schemas do not declare: a trace needs their formulas.
_WRITE_UNSAID = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")


@functools.cache
def _with_formulas() -> tuple[OpOverload, ...]:
    """Return the operators that have an autograd formula in Python, which a trace uses."""
    packets = [packet for packet in vars(torch.ops.aten).values() if isinstance(packet, OpOverloadPacket)]
    targets = (getattr(packet, name) for packet in packets for name in packet.overloads())
    return tuple(target for target in targets if _FORMULA_KEYS[0] in target.py_kernels)


def decomposed_for_autograd() -> list[OpOverload]:
    """Return operators with a kernel and a derivative of their own that a trace decomposes for autograd."""
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key
    own = [o for o in _with_formulas() if not is_composite(o.name(), "CompositeImplicitAutograd")]
    return [o for o in own if not o._schema.name.endswith(_WRITE_UNSAID)]


def resizes() -> list[OpOverload]:
    """Return the operators that compute a size, and resize to it."""
    return [o for o in _with_formulas() if "upsample" in o._schema.name and o._overloadname == "vec"]


def resized_size(size: Sequence[Any], wanted: Sequence[Any] | None, scales: Sequence[float] | None) -> Any:
    """Return the size to which a tensor of ``size`` is resized, by a size or by factors."""
    return upsample_compute_output_size(size, wanted, scales)


@contextmanager
def autograd_formulas_replaced(formulas: Mapping[OpOverload, Callable[..., Any] | None]) -> Iterator[None]:
    """Replace autograd's formulas of operators in a trace; one thread at a time.

    Args:
        formulas: operator -> its formula; ``None`` for the kernel and its own derivative.
    """
    before = {target: target.py_kernels.copy() for target in formulas}
    for target, formula in formulas.items():
        for key in _FORMULA_KEYS:
            target.py_kernels.pop(key, None)
            if formula is not None:
                target.py_kernels[key] = formula
        target._dispatch_cache.clear()
    try:
        yield
    finally:
        for target, kernels in before.items():
            target.py_kernels.clear()
            target.py_kernels.update(kernels)
            target._dispatch_cache.clear()


@functools.cache
def _derivatives_of_resizes() -> tuple[OpOverload, ...]:
    schemas = torch._C._jit_get_all_schemas()
    found = {s.name for s in schemas if re.fullmatch(r"aten::_?upsample_\w+_backward", s.name)}
    return tuple(getattr(torch.ops.aten, name.removeprefix("aten::")).default for name in sorted(found))


@contextmanager
def symbolic_resizes() -> Iterator[None]:
    """Let derivatives of resizes accept symbolic sizes in a trace; one thread at a time.

    Some of PyTorch's rules for fake tensors are written in C++ and accept only numbers.
    """
    added = [o for o in _derivatives_of_resizes() if not _is_op_registered_to_fake_rule(o)]
    for derivative in added:
        register_op_impl(derivative)(_of_input_size)
    try:
        yield
    finally:
        for derivative in added:
            _deregister_op_impl(derivative)


def _of_input_size(
    mode: FakeTensorMode,
    _: Any,
    grad_output: torch.Tensor,
    output_size: Sequence[Any],
    input_size: Sequence[Any],
    *others: Any,
    **named: Any,
) -> torch.Tensor:
    with mode:
        return grad_output.new_empty(input_size)


def _as_it_was(own: Callable[..., Any], mode: FakeTensorMode, _: Any, *args: Any, **kwargs: Any) -> Any:
    with mode:
        return own(*args, **kwargs)


def decomposition_table(
    table: Table,
    own: Table,
    adapted: Callable[[dict[Any, Callable[..., Any]]], dict[Any, Callable[..., Any]]],
    *,
    decomposed: Iterable[OpOverload],
    not_decomposed: Iterable[Any],
    over_fixed_sizes: Mapping[OpOverload, int],
    composites_only: bool,
) -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of operators that neither torch.onnx nor ``table`` translates.

    Args:
        table: translations of torch2ort.
        own: decompositions of torch2ort, which precede those of torch and any translation.
        adapted: maps all of these to the decompositions that are used.
        decomposed: composites that are decomposed although torch.onnx translates them.
        not_decomposed: operators that are not decomposed.
        over_fixed_sizes: operator -> a number of last dimensions of its input; the operator is not
            decomposed where the size of one of them varies.
        composites_only: decompose an operator that is no composite only if ``own`` does: torch's
            decompositions were not written to be differentiated afterwards.
    """
    return _table(
        frozenset(table),
        frozenset(own.items()),
        adapted,
        frozenset(decomposed),
        frozenset(not_decomposed),
        frozenset(over_fixed_sizes.items()),
        composites_only,
        number_of_operators(),
    )


def plain_decompositions(table: Table) -> Mapping[Any, Callable[..., Any]]:
    """Return torch's decompositions of all operators that neither torch.onnx nor ``table`` translates."""
    return untranslated(frozenset(table), number_of_operators())


@functools.lru_cache(maxsize=8)
def _table(
    translated: frozenset[Any],
    own: frozenset[tuple[Any, Callable[..., Any]]],
    adapted: Callable[[dict[Any, Callable[..., Any]]], dict[Any, Callable[..., Any]]],
    decomposed: frozenset[OpOverload],
    not_decomposed: frozenset[Any],
    over_fixed_sizes: frozenset[tuple[OpOverload, int]],
    composites_only: bool,
    operators: int,
) -> dict[Any, Callable[..., Any]]:
    decompositions = {
        target: function
        for target, function in untranslated(translated, operators).items()
        if target not in not_decomposed and not _is_left(target, function, composites_only=composites_only)
    }
    defaults = _defaults(operators)
    decompositions.update({target: defaults[target] for target in decomposed})
    for target, count in over_fixed_sizes:
        if target in decompositions:
            decompositions[target] = functools.partial(_of_fixed_sizes, decompositions[target], count)
    for bucketize in (torch.ops.aten.bucketize.Tensor, torch.ops.aten.bucketize.Scalar):
        if bucketize in decompositions:
            decompositions[bucketize] = functools.partial(_of_an_axis, decompositions[bucketize])
    decompositions.update(own)
    return adapted(decompositions)


@functools.lru_cache(maxsize=1)
@_composites_found_once()
def _defaults(_: int) -> Mapping[OpOverload, Callable[..., Any]]:
    return dict(torch.export.default_decompositions().items())


@_composites_found_once()
def decompose(
    program: torch.export.ExportedProgram, decompositions: Mapping[Any, Callable[..., Any]]
) -> torch.export.ExportedProgram:
    """Functionalise ``program`` and decompose it.

    Args:
        program: the result of torch.export.
        decompositions: the result of :func:`decomposition_table`.
    """
    with decomposing(program):
        try:
            program = program.run_decompositions(dict(decompositions))
        except AssertionError as error:
            raise ExportError(
                f"torch.export cannot decompose the program that it traced ({error}). One cause is a tensor "
                f"that forward writes to and that is neither a buffer of a module nor an argument"
            ) from error
    remove_assertions(program.graph_module)
    return program


_ASSERTIONS = frozenset(
    {
        torch.ops.aten.sym_constrain_range_for_size.default,
        torch.ops.aten._assert_async.default,
        torch.ops.aten._assert_async.msg,
        torch.ops.aten._assert_scalar.default,
        torch.ops.aten._assert_tensor_metadata.default,
    }
)


def remove_assertions(program: torch.fx.GraphModule) -> None:
    """Erase torch's own assertions from a program and the graphs within it."""
    for module in program.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in list(module.graph.nodes):
                if node.target in _ASSERTIONS:
                    module.graph.erase_node(node)


@functools.cache
def parts_of(target: OpOverload) -> Callable[..., Any] | None:
    """Return the decomposition of a composite that torch.export always decomposes; ``None`` for others.

    torch.export does so because the composite's result may be a view.
    """
    is_kept = not target._can_decompose() or _export_utils._is_preservable_cia_op(target)
    return None if is_kept else target.decompose


@contextmanager
def decomposing(program: torch.export.ExportedProgram) -> Iterator[None]:
    """Trace decompositions for the sizes of a program; one thread at a time."""
    from torch._inductor import config as inductor  # slow to import; a graph out of the cache needs none

    # Tracing must not distinguish sizes of 0 and 1 from others, or a symbolic size becomes fixed.
    # A random operator whose numbers are unused advances the generator in eager PyTorch, too.
    sizes = _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    with sizes, inductor.patch(fallback_random=True), symbolic_resizes(), sizes_of_zero(program):
        yield


def _of_fixed_sizes(
    decomposition: Callable[..., Any], count: int, input: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    if not all(isinstance(size, int) for size in input.shape[-count:]):
        return NotImplemented
    return decomposition(input, *args, **kwargs)


def _of_an_axis(
    decomposition: Callable[..., Any],
    input: torch.Tensor | float,
    boundaries: torch.Tensor,
    **kwargs: Any,
) -> Any:
    """Apply ``decomposition``, which would read the value of a tensor without dimensions."""
    if not isinstance(input, torch.Tensor):
        kind = torch.result_type(boundaries, input)
        input = torch.scalar_tensor(input, dtype=kind, device=boundaries.device)
    if input.dim():
        return decomposition(input, boundaries, **kwargs)
    return decomposition(input.reshape(1), boundaries, **kwargs).reshape([])


# Their decompositions have no arithmetic, or arithmetic of integers only.
_HARMLESS = frozenset(
    {
        "_chunk_cat", "_reshape_alias", "alias_copy", "block_diag", "bucketize", "count_nonzero",
        "diagonal_copy", "expand_copy", "isin", "lift", "lift_fresh", "linspace", "narrow_copy",
        "permute_copy", "split_with_sizes_copy", "squeeze_copy", "t_copy", "transpose_copy", "tril_indices",
        "triu_indices", "unbind_copy", "unfold_copy", "unsafe_split_with_sizes", "unsqueeze_copy", "zero",
    }
)  # fmt: skip


@functools.cache
def _is_left(target: Any, function: Callable[..., Any], *, composites_only: bool) -> bool:
    if target._schema.name.removeprefix("aten::") in _HARMLESS:
        return False
    # A decomposed random operator draws other numbers, and PyTorch has no kernels for `prims`.
    if torch.Tag.nondeterministic_seeded in target.tags:
        return True
    prims = getattr(inspect.unwrap(function), "__module__", "").startswith("torch._refs")
    return (composites_only or prims) and not target._can_decompose()
