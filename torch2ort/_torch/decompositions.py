"""Private names of torch.onnx, its decompositions and torch's operators, and the versions tried.

| name | tried on |
| --- | --- |
| torch.onnx._internal.exporter._registration.ONNXRegistry | 2.11-2.15.0 |
| torch.onnx._internal.exporter._dispatching.dispatch | 2.11-2.15.0 |
| torch.onnx._internal.exporter._errors.ConversionError (text of its message) | 2.11-2.15.0 |
| onnxscript.evaluator.default(), a tracer: ``nodes``, ``constant_farm`` | 2.11-2.15.0 (onnxscript 0.7.2) |
| torch.onnx._internal.exporter._core._exported_program_to_onnx_program | 2.11-2.15.0 |
| torch.onnx._internal.exporter._fx_passes.remove_assertion_nodes | 2.11-2.15.0 |
| torch.onnx._internal.fx.passes.type_promotion | 2.13.0 |
| torch.onnx._internal.exporter._decomp.create_onnx_friendly_decomposition_table | 2.11-2.15.0 |
| torch._ops.OpOverload, HigherOrderOperator, OpOverload._schema, OpOverload._can_decompose | 2.11-2.15.0 |
| torch._C._dispatch_has_kernel_for_dispatch_key | 2.11-2.15.0 |
| OpOverload.py_kernels, _dispatch_cache, and torch._refs, which fills the former | 2.11-2.15.0 |
| torch._decomp.decompositions.upsample_compute_output_size | 2.11-2.15.0 |
| torch.utils._python_dispatch.TorchDispatchMode, _disable_current_modes | 2.11-2.15.0 |
| torch._subclasses.fake_tensor.FakeTensor | 2.11-2.15.0 |
| torch._subclasses.functional_tensor.FunctionalTensor | 2.13.0 |
| torch.fx.experimental._config | 2.11-2.15.0 |
| aten::_linalg_det, aten::_linalg_slogdet: what they keep | 2.11-2.15.0 |
| torch._inductor.config.fallback_random | 2.11-2.15.0 |
| torch._export.utils: how composites are collected, see ``_composites`` | 2.11-2.15.0 |
| torch.export.exported_program: how composites are overridden, see ``_overridden`` | 2.11-2.15.0 |
| torch._higher_order_ops.utils.autograd_not_implemented | 2.11-2.15.0 |
| torch._subclasses.fake_impls: rules of composites for fake tensors | 2.11-2.15.0 |
| torch._C._jit_get_all_schemas | 2.13.0 |
| ExportedProgram._graph_signature | 2.11-2.15.0 |
| torch.fx.experimental.symbolic_shapes.statically_known_true | 2.13.0 |
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import onnx_ir as ir
import onnxscript.evaluator
import sympy
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch2ort.errors import ExportError, UnsupportedOperatorError
from torch2ort.log import quiet
from torch2ort.support.provenance import source_line
from torch2ort.support.versions import need, private_names

with private_names("torch"):
    import torch._refs.nn.functional
    from torch._decomp.decompositions import upsample_compute_output_size
    from torch._dispatch.python import enable_python_dispatcher
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
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.export import decomp_utils, exported_program
    from torch.fx.experimental import _config
    from torch.fx.experimental.symbolic_shapes import statically_known_true
    from torch.fx.traceback import preserve_node_meta
    from torch.onnx._internal.exporter import (
        _building,
        _core,
        _decomp,
        _dispatching,
        _errors,
        _fx_passes,
        _registration,
    )
    from torch.onnx._internal.fx.passes import type_promotion as _type_promotion
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

    need(torch._C, "_dispatch_has_kernel_for_dispatch_key")
    need(OpOverload, "_schema", "_can_decompose", "py_kernels", "_dispatch_cache", "_overloadname")
    need(_export_utils, "_collect_all_valid_cia_ops", "_get_decomp_for_cia", "_materialize_cpp_cia_ops")
    need(_export_utils, "_is_preservable_cia_op")
    need(decomp_utils, "_collect_all_valid_cia_ops")
    need(exported_program, "_collect_all_valid_cia_ops", "_override_composite_implicit_decomp")
    need(exported_program, "_AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE", "_BACKEND_KEYS_TO_OVERRIDE")
    need(torch.export.ExportedProgram, "_graph_signature")
    need(_config, "patch", "backed_size_oblivious")
    need(_building.OpRecorder, "nodes")
    need(_core, "_exported_program_to_onnx_program")
    need(_decomp, "create_onnx_friendly_decomposition_table")
    need(_dispatching, "dispatch")
    need(_errors, "ConversionError")
    need(_fx_passes, "remove_assertion_nodes")
    need(_type_promotion, "TypePromotionTable", "_TypePromotionInterpreter", "get_type_promotion_rule")
    need(_type_promotion._TypePromotionInterpreter, "_maybe_promote_node")
    need(_registration.ONNXRegistry, "from_torchlib", "functions", "get_decomps", "register_op")
    need(_registration.OnnxDecompMeta, "fx_target", "is_complex", "onnx_function", "skip_signature_inference")

# What these keep for backward is the LU decomposition of the matrix, or of its transpose where it lies in
# rows; autograd's formula asks how the matrix lies.
KEEPS_WHAT_LIES_IN_ROWS = frozenset(
    {torch.ops.aten._linalg_det.default, torch.ops.aten._linalg_slogdet.default}
)

Table = Mapping[Any, Callable[..., Any]]
# The attribute of a translation that says whether it is for complex tensors.
OF_COMPLEX = "of_complex"
# What a trace gives in the place of a tensor.
TRACED_TENSORS = (FakeTensor, FunctionalTensor)


@functools.cache
def _torchlib() -> _registration.ONNXRegistry:
    with quiet():
        return _registration.ONNXRegistry.from_torchlib()


def registry(table: Table) -> _registration.ONNXRegistry:
    """Translations of torch.onnx with those of ``table`` in front of them."""
    result = _registration.ONNXRegistry()
    result.functions = {target: list(metas) for target, metas in _torchlib().functions.items()}
    with quiet():
        for target, function in table.items():
            result.register_op(target, function, is_complex=getattr(function, OF_COMPLEX, False))
    return result


def _with_results_of_its_own(known: _registration.ONNXRegistry) -> _registration.ONNXRegistry:
    """Keep a translation that has nothing to do from returning its argument.

    torch.onnx names a result after the operator, and would rename the argument.
    """
    wrapped = _registration.ONNXRegistry()
    for target, metas in known.functions.items():
        wrapped.functions[target] = [
            dataclasses.replace(meta, onnx_function=_fresh(meta.onnx_function), skip_signature_inference=True)
            for meta in metas
        ]
    return wrapped


def _fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    def translate(*args: Any, **kwargs: Any) -> Any:
        tracer: Any = onnxscript.evaluator.default()
        tracer.constant_farm = _BySign(tracer.constant_farm)
        result = function(*args, **kwargs)
        if isinstance(result, ir.Value):
            return _own(result)
        return [_own(v) for v in result] if isinstance(result, (list, tuple)) else result

    return translate


class _BySign:
    """A graph's constants, in which 0.0 and -0.0 are two: a dictionary takes them for one key."""

    def __init__(self, known: dict[Any, ir.Value]) -> None:
        self._known = known

    def get(self, key: tuple[Any, ir.DataType]) -> ir.Value | None:
        """The constant of a number, or of several, in an element type."""
        return self._known.get(_signed(key))

    def __setitem__(self, key: tuple[Any, ir.DataType], constant: ir.Value) -> None:
        self._known[_signed(key)] = constant


def _signed(key: tuple[Any, ir.DataType]) -> tuple[Any, ...]:
    numbers = key[0] if isinstance(key[0], tuple) else key[:1]
    return (*key, *(math.copysign(1, n) for n in numbers if isinstance(n, float)))


def _own(value: Any) -> Any:
    nodes = recorded_nodes()
    if not isinstance(value, ir.Value) or any(value.producer() is node for node in nodes):
        return value
    node = ir.Node("", "Identity", [value], num_outputs=1)
    nodes.append(node)
    node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
    return node.outputs[0]


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def _composites_found_once() -> Iterator[None]:
    """Have torch.export find all composites once, and give each its kernels without ceremony.

    torch asks the dispatcher for them again for each of some thirty namespaces, three times a program,
    and sets fifteen kernels of each of hundreds of them through a decorator that writes its type down:
    most of the time that a small program takes. What it finds and sets is the same. The caller sees to
    it that one thread at a time is here.
    """
    found = functools.cache(_composites)
    with (
        _replaced(exported_program, "_collect_all_valid_cia_ops", found),
        _replaced(decomp_utils, "_collect_all_valid_cia_ops", found),
        _replaced(exported_program, "_override_composite_implicit_decomp", _overridden),
    ):
        yield


def _composites() -> set[Any]:
    """All composites, for which the dispatcher was asked once instead of for each namespace."""
    _export_utils._materialize_cpp_cia_ops()
    with _replaced(_export_utils, "_materialize_cpp_cia_ops", lambda: None):
        return _export_utils._collect_all_valid_cia_ops()


@contextmanager
def _overridden(composites: Mapping[OpOverload, Callable[..., Any]]) -> Iterator[None]:
    """What torch.export.exported_program._override_composite_implicit_decomp does."""
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
# They write running statistics, of which their schemas say nothing: a trace needs their formulas.
_WRITE_UNSAID = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")


@functools.cache
def _with_formulas() -> tuple[OpOverload, ...]:
    """Operators for which autograd meets a formula in Python in a trace."""
    packets = [packet for packet in vars(torch.ops.aten).values() if isinstance(packet, OpOverloadPacket)]
    targets = (getattr(packet, name) for packet in packets for name in packet.overloads())
    return tuple(target for target in targets if _FORMULA_KEYS[0] in target.py_kernels)


def taken_apart() -> list[OpOverload]:
    """Operators with a kernel and a derivative of their own that autograd meets in parts in a trace."""
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key
    own = [o for o in _with_formulas() if not is_composite(o.name(), "CompositeImplicitAutograd")]
    return [o for o in own if not o._schema.name.endswith(_WRITE_UNSAID)]


def resizes() -> list[OpOverload]:
    """Operators that compute a size, and resize to it."""
    return [o for o in _with_formulas() if "upsample" in o._schema.name and o._overloadname == "vec"]


def resized_size(size: Sequence[Any], wanted: Sequence[Any] | None, scales: Sequence[float] | None) -> Any:
    """The size that a tensor of ``size`` is resized to, by a size or by factors."""
    return upsample_compute_output_size(size, wanted, scales)


@contextmanager
def formulas_met(formulas: Mapping[OpOverload, Callable[..., Any] | None]) -> Iterator[None]:
    """Have autograd meet other formulas in a trace; one thread at a time.

    Args:
        formulas: operator -> its formula, ``None`` for the kernel and its own derivative.
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
    """Have derivatives of resizes take sizes that vary in a trace; one thread at a time.

    Some of PyTorch's rules for tensors without data take numbers alone, as those are written in C++.
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


def with_data() -> AbstractContextManager[Any]:
    """Compute with tensors that have data, in a trace."""
    manager: AbstractContextManager[Any] = _disable_current_modes()
    return manager


def _as_it_was(own: Callable[..., Any], mode: FakeTensorMode, _: Any, *args: Any, **kwargs: Any) -> Any:
    with mode:
        return own(*args, **kwargs)


# Sizes that an export lets be 0, while a program is decomposed.
_may_be_zero: ContextVar[frozenset[sympy.Symbol]] = ContextVar("_may_be_zero", default=frozenset())


@contextmanager
def _sizes_of_zero(program: torch.export.ExportedProgram) -> Iterator[None]:
    """Have :func:`is_never_zero` tell for the sizes of this program."""
    least = {symbol: bounds.lower for symbol, bounds in program.range_constraints.items()}
    token = _may_be_zero.set(frozenset(symbol for symbol, lower in least.items() if lower < 1))
    try:
        yield
    finally:
        _may_be_zero.reset(token)


def decomposition_table(
    table: Table,
    own: Table,
    adapted: Callable[[dict[Any, Callable[..., Any]]], dict[Any, Callable[..., Any]]],
    *,
    decomposed: Iterable[OpOverload],
    whole: Container[Any],
    over_fixed_sizes: Mapping[OpOverload, int],
    composites_only: bool,
) -> dict[Any, Callable[..., Any]]:
    """Decompositions of what neither torch.onnx nor ``table`` translates.

    Args:
        table: translations of our own.
        own: decompositions of our own, which go before those of torch and before any translation.
        adapted: from all of these to those that are used.
        decomposed: composites that are decomposed although torch.onnx translates them.
        whole: operators to leave as they are.
        over_fixed_sizes: operators to leave where one of so many last sizes of their input varies.
        composites_only: leave every operator that is no composite as it is, unless ``own`` decomposes it:
            nobody made torch's decompositions for being differentiated afterwards.
    """
    known = {meta.fx_target for metas in registry(table).functions.values() for meta in metas}
    decompositions = {
        target: function
        for target, function in _decomp.create_onnx_friendly_decomposition_table(known).items()
        if target not in whole and not _is_left(target, function, composites_only=composites_only)
    }
    defaults = torch.export.default_decompositions()
    decompositions.update({target: defaults[target] for target in decomposed})
    for target, count in over_fixed_sizes.items():
        if target in decompositions:
            decompositions[target] = functools.partial(_of_fixed_sizes, decompositions[target], count)
    for bucketize in (torch.ops.aten.bucketize.Tensor, torch.ops.aten.bucketize.Scalar):
        if bucketize in decompositions:
            decompositions[bucketize] = functools.partial(_of_an_axis, decompositions[bucketize])
    decompositions.update(own)
    return adapted(decompositions)


@_composites_found_once()
def decompose(
    program: torch.export.ExportedProgram, decompositions: Mapping[Any, Callable[..., Any]]
) -> torch.export.ExportedProgram:
    """Functionalise ``program`` and decompose it.

    Args:
        program: the program as torch.export gives it.
        decompositions: of :func:`decomposition_table`.
    """
    with decomposing(program):
        try:
            program = program.run_decompositions(dict(decompositions))
        except AssertionError as error:
            raise ExportError(
                f"torch.export cannot decompose the program that it traced ({error}). One cause is a tensor "
                f"that forward writes to and that is neither a buffer of a module nor an argument"
            ) from error
    remove_assertions(program)
    return program


@functools.cache
def parts_of(target: OpOverload) -> Callable[..., Any] | None:
    """The decomposition of a composite that torch.export never keeps whole, as its result may be a view."""
    is_kept = not target._can_decompose() or _export_utils._is_preservable_cia_op(target)
    return None if is_kept else target.decompose


def remove_assertions(program: torch.export.ExportedProgram) -> None:
    """Erase torch's own assertions from a program."""
    _fx_passes.remove_assertion_nodes(program.graph_module)


@contextmanager
def decomposing(program: torch.export.ExportedProgram) -> Iterator[None]:
    """Trace decompositions for the sizes of a program; one thread at a time."""
    from torch._inductor import config as inductor  # slow to import; a graph out of the cache needs none

    # Sizes of 0 and 1 must not be told apart while tracing, or a size that varies gets fixed.
    # And a random operator whose numbers nobody reads moves the generator on, in eager.
    sizes = _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    with sizes, inductor.patch(fallback_random=True), symbolic_resizes(), _sizes_of_zero(program):
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
    """As ``decomposition``, which would ask a tensor without axes for its number."""
    if not isinstance(input, torch.Tensor):
        kind = torch.result_type(boundaries, input)
        input = torch.scalar_tensor(input, dtype=kind, device=boundaries.device)
    if input.dim():
        return decomposition(input, boundaries, **kwargs)
    return decomposition(input.reshape(1), boundaries, **kwargs).reshape([])


# No arithmetic in them, or integers only.
_HARMLESS = frozenset(
    {
        "_chunk_cat", "_reshape_alias", "alias_copy", "block_diag", "bucketize", "count_nonzero",
        "diagonal_copy", "expand_copy", "isin", "lift", "lift_fresh", "linspace", "narrow_copy",
        "permute_copy", "split_with_sizes_copy", "squeeze_copy", "t_copy", "transpose_copy", "tril_indices",
        "triu_indices", "unbind_copy", "unfold_copy", "unsafe_split_with_sizes", "unsqueeze_copy", "zero",
    }
)  # fmt: skip


def _is_left(target: Any, function: Callable[..., Any], *, composites_only: bool) -> bool:
    if target._schema.name.removeprefix("aten::") in _HARMLESS:
        return False
    # A decomposed random operator draws other numbers, and PyTorch's kernel cannot take `prims`.
    if torch.Tag.nondeterministic_seeded in target.tags:
        return True
    prims = getattr(inspect.unwrap(function), "__module__", "").startswith("torch._refs")
    return (composites_only or prims) and not target._can_decompose()


def torchlib_translation(target: Any) -> Callable[..., Any] | None:
    """torch.onnx's translation of an operator for real numbers."""
    metas = _torchlib().get_decomps(target)
    return next((meta.onnx_function for meta in metas if not meta.is_complex), None)


def has_translation(node: torch.fx.Node, known: _registration.ONNXRegistry) -> bool:
    """Whether torch.onnx, with the translations of ``known``, can translate ``node``."""
    return _dispatching.dispatch(node, known)[0] is not None


def to_onnx(program: torch.export.ExportedProgram, table: Table) -> ir.Model:
    """Translate a decomposed program, with nothing pruned or optimised.

    ``torch.onnx.export`` would decompose a second time, and drop the values that only a mutation
    needs and the outputs that only a gradient reads.
    """
    known = _with_results_of_its_own(registry(table))
    dtypes = {node: _dtype(node) for node in program.graph.nodes}
    with quiet():
        # torch 2.11 takes the first operator that runs here for the promoted one, and where an input
        # requires a gradient that is the question for its device.
        with torch.no_grad():
            _promote_types(program)
        for node, dtype in dtypes.items():
            _keep_dtype(node, dtype)
        sync_output_names(program)
        return _core._exported_program_to_onnx_program(program, registry=known).model


class _Promotion(_type_promotion._TypePromotionInterpreter):
    """torch.onnx's promotion of types, which runs every node to learn what the graph's metadata says."""

    def run_node(self, n: torch.fx.Node) -> Any:
        """Promote the arguments of a node, and return the value that the trace has of it."""
        rule = _type_promotion.get_type_promotion_rule(n, self.type_promotion_table)
        if rule:
            with self._set_current_node(n):
                self._maybe_promote_node(n, rule)
        return n.meta.get("val")


def _promote_types(program: torch.export.ExportedProgram) -> None:
    mode = fake_mode(program.graph)
    if mode is None:
        return
    values = [n.meta.get("val") for n in program.graph.find_nodes(op="placeholder")]
    promotion = _Promotion(program.graph_module, _promotion_table())
    # Sizes that vary stay so in the rules of the Python dispatcher.
    with mode, enable_python_dispatcher(), preserve_node_meta():
        promotion.run(*values, enable_io_processing=False)


@functools.cache
def _promotion_table() -> Any:
    return _type_promotion.TypePromotionTable()


def _dtype(node: torch.fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    if node.target is operator.getitem:
        source, index = node.args
        value = source.meta["val"][index]  # type: ignore[union-attr]
    return value.dtype if isinstance(value, torch.Tensor) else None


def _keep_dtype(node: torch.fx.Node, dtype: torch.dtype | None) -> None:
    """Give the result of a node the type that it has in eager, where torch.onnx promotes it for good.

    Raises:
        UnsupportedOperatorError: what was computed in another type is not what eager computes.
    """
    found = _dtype(node)
    if found is dtype or dtype is None or node.op != "call_function":
        return
    if found is not torch.float32 or dtype not in (torch.float16, torch.bfloat16):
        raise UnsupportedOperatorError(
            f"{node.target} at {source_line(node)} gives {dtype} in eager PyTorch, and {found} in the "
            f"translation of torch.onnx. Convert its arguments with .to(dtype), or register a translation "
            f"with torch2ort.register_symbolic"
        )
    with node.graph.inserting_after(node):
        result = node.graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)
    result.meta = dict(node.meta)
    value = node.meta["val"]
    if node.target is operator.getitem:
        value = node.meta["val"] = node.args[0].meta["val"][node.args[1]]  # type: ignore[union-attr]
    result.meta["val"] = value.to(dtype)


def recorded_nodes() -> list[ir.Node]:
    """The list that collects the nodes of the translation function now running."""
    nodes: list[ir.Node] = onnxscript.evaluator.default().nodes  # type: ignore[attr-defined]
    return nodes


ConversionError = _errors.ConversionError


def failing_node(error: BaseException) -> str | None:
    """Name of the FX node that torch.onnx could not translate, read out of its error."""
    cause: BaseException | None = error
    while cause is not None:
        match = re.match(r"Error when translating node %?(\w+)", str(cause))
        if match:
            return match.group(1)
        cause = cause.__cause__
    return None


def fake_mode(graph: torch.fx.Graph) -> FakeTensorMode | None:
    """The mode in which the values of a program were traced; ``None`` if it has no tensors."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


def is_known(condition: bool | torch.SymBool) -> bool:
    """Whether ``condition`` holds for every size; ``False`` too where nobody can tell."""
    return bool(statically_known_true(condition))


def is_never_zero(size: int | torch.SymInt) -> bool:
    """Whether a size in a decomposition is none that an export lets be 0.

    A trace takes sizes that vary for 2 or more, whatever bounds they were given.
    """
    if isinstance(size, int):
        return size > 0
    return is_known(size > 0) and _may_be_zero.get().isdisjoint(size.node.expr.free_symbols)


def sync_output_names(program: torch.export.ExportedProgram) -> None:
    """Make the signature name the nodes that the graph now returns."""
    signature = program.graph_signature
    specs = []
    for spec, node in zip(signature.output_specs, program.graph.output_node().args[0], strict=True):
        if isinstance(node, torch.fx.Node) and getattr(spec.arg, "name", None) not in (None, node.name):
            spec = dataclasses.replace(spec, arg=dataclasses.replace(spec.arg, name=node.name))
        specs.append(spec)
    program._graph_signature = dataclasses.replace(signature, output_specs=specs)


_AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


@functools.lru_cache(maxsize=4096)
def has_autocast(operator: Any, kinds: tuple[str, ...]) -> bool:
    """Whether autocast has something to say of an operator itself, on one of these kinds of devices."""
    has: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has(operator.name(), _AUTOCAST_KEYS[kind]) for kind in kinds)


class Recorded(TorchDispatchMode):
    """Notes what operators are run inside, below autocast and autograd.

    Attributes:
        calls: each operator that gave tensors, those that it took and those that it gave.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[torch.Tensor], list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note it."""
        result = func(*args, **(kwargs or {}))
        given = _tensors((result,))
        if given:
            self.calls.append((func, _tensors((*args, *(kwargs or {}).values())), given))
        return result


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            found += _tensors(value)
        elif isinstance(value, torch.Tensor):
            found.append(value)
    return found


def traced(function: Callable[..., Any], values: Sequence[Any]) -> torch.fx.Graph:
    """The operators that ``function`` calls of tensors without data, below autocast and autograd."""
    graph: torch.fx.Graph = make_fx(function)(*values).graph
    return graph
