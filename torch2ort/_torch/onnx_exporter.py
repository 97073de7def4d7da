"""Private names of torch.onnx's exporter, and the versions tried.

| name | tried on |
| --- | --- |
| torch.onnx._internal.exporter._registration.ONNXRegistry | 2.11-2.15.0 |
| torch.onnx._internal.exporter._dispatching.dispatch | 2.11-2.15.0 |
| torch.onnx._internal.exporter._errors.ConversionError (text of its message) | 2.11-2.15.0 |
| onnxscript.evaluator.default(), a tracer: ``nodes``, ``constant_farm`` | 2.11-2.15.0 (onnxscript 0.7.2) |
| torch.onnx._internal.exporter._core._exported_program_to_onnx_program | 2.11-2.15.0 |
| torch.onnx._internal.fx.passes.type_promotion | 2.13.0 |
| torch.onnx._internal.exporter._decomp.create_onnx_friendly_decomposition_table | 2.11-2.15.0 |
| ExportedProgram._graph_signature | 2.11-2.15.0 |
| torch.library._defs, torch._C._dispatch_get_all_op_names | 2.13.0 |
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import onnx_ir as ir
import onnxscript.evaluator
import torch

from torch2ort._torch.fake_tensors import fake_mode
from torch2ort.errors import UnsupportedOperatorError
from torch2ort.log import suppress_libraries
from torch2ort.support.provenance import source_line
from torch2ort.support.versions import need, private_names

with private_names("torch"):
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.traceback import preserve_node_meta
    from torch.onnx._internal.exporter import (
        _building,
        _core,
        _decomp,
        _dispatching,
        _errors,
        _registration,
    )
    from torch.onnx._internal.fx.passes import type_promotion as _type_promotion

    need(torch.export.ExportedProgram, "_graph_signature")
    need(torch.library, "_defs")
    need(_building.OpRecorder, "nodes")
    need(_core, "_exported_program_to_onnx_program")
    need(_decomp, "create_onnx_friendly_decomposition_table")
    need(_dispatching, "dispatch")
    need(_errors, "ConversionError")
    need(_type_promotion, "TypePromotionTable", "_TypePromotionInterpreter", "get_type_promotion_rule")
    need(_type_promotion._TypePromotionInterpreter, "_maybe_promote_node")
    need(_registration.ONNXRegistry, "from_torchlib", "functions", "get_decomps", "register_op")
    need(_registration.OnnxDecompMeta, "fx_target", "is_complex", "onnx_function", "skip_signature_inference")

Table = Mapping[Any, Callable[..., Any]]
# The attribute of a translation that is True if it is for complex tensors.
OF_COMPLEX = "of_complex"


@functools.cache
def _torchlib() -> _registration.ONNXRegistry:
    with suppress_libraries():
        return _registration.ONNXRegistry.from_torchlib()


def registry(table: Table) -> _registration.ONNXRegistry:
    """Return the translations of torch.onnx, preceded by those of ``table``."""
    return _in_front([_registered(*entry).plain for entry in table.items()], _torchlib().functions)


class _Registered(NamedTuple):
    """A translation as torch.onnx stores it, with its signature.

    Attributes:
        plain: the key by which torch.onnx finds it, and the translation.
        apart: the same, changed by :func:`_with_own_results`.
    """

    plain: tuple[Any, _registration.OnnxDecompMeta]
    apart: tuple[Any, _registration.OnnxDecompMeta]

    @classmethod
    def of(cls, target: Any, function: Callable[..., Any]) -> _Registered:
        """Register a translation of an operator."""
        alone = _registration.ONNXRegistry()
        with suppress_libraries():
            alone.register_op(target, function, is_complex=getattr(function, OF_COMPLEX, False))
        ((key, (meta,)),) = alone.functions.items()
        return cls((key, meta), (key, _with_own_results(meta)))


# A translation that is the same for many programs is registered once.
_registered = functools.lru_cache(maxsize=4096)(_Registered.of)


def _in_front(
    own: Iterable[tuple[Any, _registration.OnnxDecompMeta]],
    others: Mapping[Any, list[_registration.OnnxDecompMeta]],
) -> _registration.ONNXRegistry:
    result = _registration.ONNXRegistry()
    result.functions = {**others, **{key: [meta, *others.get(key, ())] for key, meta in own}}
    return result


@functools.cache
def _torchlib_with_own_results() -> dict[Any, list[_registration.OnnxDecompMeta]]:
    return {target: list(map(_with_own_results, metas)) for target, metas in _torchlib().functions.items()}


def _with_own_results(meta: _registration.OnnxDecompMeta) -> _registration.OnnxDecompMeta:
    """Return the translation with an Identity in place of a result that is its argument.

    torch.onnx names a result after the operator, and would rename the argument.
    """
    return dataclasses.replace(meta, onnx_function=_fresh(meta.onnx_function), skip_signature_inference=True)


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
    """A graph's constants, with 0.0 and -0.0 as different keys: a dictionary treats them as equal."""

    def __init__(self, known: dict[Any, ir.Value]) -> None:
        self._known = known

    def get(self, key: tuple[Any, ir.DataType]) -> ir.Value | None:
        """Return the constant of a number, or of several, in an element type."""
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


def torchlib_translation(target: Any) -> Callable[..., Any] | None:
    """Return torch.onnx's translation of an operator for real numbers."""
    metas = _torchlib().get_decomps(target)
    return next((meta.onnx_function for meta in metas if not meta.is_complex), None)


def has_translation(node: torch.fx.Node, known: _registration.ONNXRegistry) -> bool:
    """Return True if torch.onnx, with the translations of ``known``, can translate ``node``."""
    return _dispatching.dispatch(node, known)[0] is not None


def to_onnx(program: torch.export.ExportedProgram, table: Table, calls: Table) -> ir.Model:
    """Translate a decomposed program, without pruning or optimisation.

    ``torch.onnx.export`` would decompose a second time, and drop the values that only a mutation
    needs and the outputs that only a gradient reads.

    Args:
        program: the program.
        table: translations that are the same for many programs.
        calls: those of this program alone.
    """
    own = [_registered(*entry).apart for entry in table.items()]
    # These are not cached: they hold a program, which a cache would keep alive.
    own += [_Registered.of(*entry).apart for entry in calls.items()]
    known = _in_front(own, _torchlib_with_own_results())
    dtypes = {node: _dtype(node) for node in program.graph.nodes}
    with suppress_libraries():
        # torch 2.11 treats the first operator that runs here as the promoted one; where an input requires
        # a gradient, that is the operator that reads its device.
        with torch.no_grad():
            _promote_types(program)
        for node, dtype in dtypes.items():
            _keep_dtype(node, dtype)
        sync_output_names(program)
        return _core._exported_program_to_onnx_program(program, registry=known).model


class _Promotion(_type_promotion._TypePromotionInterpreter):
    """torch.onnx's type promotion, which reads each node's value in the trace instead of running the node."""

    def run_node(self, n: torch.fx.Node) -> Any:
        """Promote the arguments of a node, and return the node's value in the trace."""
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
    # The rules of the Python dispatcher keep symbolic sizes symbolic.
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
    """Cast the result of a node to its dtype in eager PyTorch, where torch.onnx promotes it to another.

    Raises:
        UnsupportedOperatorError: a result computed in that other dtype differs from eager PyTorch's.
    """
    found = _dtype(node)
    if found is dtype or dtype is None or node.op != "call_function":
        return
    if found is not torch.float32 or dtype not in (torch.float16, torch.bfloat16):
        raise UnsupportedOperatorError(
            f"{node.target} at {source_line(node)} returns {dtype} in eager PyTorch, and {found} in the "
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
    """Return the list that collects the nodes of the running translation function."""
    nodes: list[ir.Node] = onnxscript.evaluator.default().nodes  # type: ignore[attr-defined]
    return nodes


ConversionError = _errors.ConversionError


def failing_node(error: BaseException) -> str | None:
    """Return the name of the FX node that torch.onnx could not translate, parsed from its error."""
    cause: BaseException | None = error
    while cause is not None:
        match = re.match(r"Error when translating node %?(\w+)", str(cause))
        if match:
            return match.group(1)
        cause = cause.__cause__
    return None


def sync_output_names(program: torch.export.ExportedProgram) -> None:
    """Set the names in the signature's outputs to those of the nodes that the graph now returns."""
    signature = program.graph_signature
    specs = []
    for spec, node in zip(signature.output_specs, program.graph.output_node().args[0], strict=True):
        if isinstance(node, torch.fx.Node) and getattr(spec.arg, "name", None) not in (None, node.name):
            spec = dataclasses.replace(spec, arg=dataclasses.replace(spec.arg, name=node.name))
        specs.append(spec)
    program._graph_signature = dataclasses.replace(signature, output_specs=specs)


@functools.lru_cache(maxsize=16)
def untranslated(targets: frozenset[Any], operators: int) -> Mapping[Any, Callable[..., Any]]:
    """Return torch's decompositions of operators that neither torch.onnx nor torch2ort translates.

    Args:
        targets: the operators that torch2ort translates.
        operators: the result of :func:`number_of_operators`, a part of the cache's key.
    """
    known: Any = {*targets, *(meta.fx_target for metas in _torchlib().functions.values() for meta in metas)}
    return _decomp.create_onnx_friendly_decomposition_table(known)


def number_of_operators() -> int:
    """Return the number of operators and decompositions; a library that is imported later adds some."""
    # C++ operators are added with a module or a library. The list of their names has thousands of entries.
    brought = len(sys.modules), len(torch.ops.loaded_libraries), len(torch.library._defs)
    return _names_of_operators(brought) + len(torch._decomp.decomposition_table)


@functools.lru_cache(maxsize=1)
def _names_of_operators(_: tuple[int, ...]) -> int:
    return len(torch._C._dispatch_get_all_op_names())
