"""Private names of symbolic shapes, and the versions tried.

| name | tried on |
| --- | --- |
| SymInt.node.hint, SymInt.node.expr, SymInt.node._expr | 2.11-2.15.0 |
| FakeTensor.fake_mode, FakeTensorMode.shape_env | 2.11-2.15.0 |
| ShapeEnv.source_name_to_debug_name, source_to_var, create_symintnode | 2.11-2.15.0 |
| ShapeEnv.guards, ShapeEnv.num_deferred_runtime_asserts, ShapeEnv.deferred_runtime_asserts | 2.11-2.15.0 |
| ShapeEnv.pending_fresh_unbacked_symbols | 2.11-2.15.0 |
| ShapeEnv._set_replacement, ShapeEnv.replacements | 2.12.1-2.15.0 |
| SymInt.node.shape_env, ShapeEnv.bound_sympy | 2.12.1-2.15.0 |
| torch.utils._sympy.printers.PythonPrinter | 2.11-2.15.0 |
| torch.ops.aten._assert_scalar, which torch.export adds for its assumption about a size | 2.11-2.15.0 |
| torch._C._select_conv_backend, _conv_determine_backend_memory_format | 2.13.0 |
| ShapeEnv.backed_var_to_val, or ShapeEnv.var_to_val where torch lacks it | 2.13.0 |
| ShapeEnv.unbacked_symint_counter | 2.13.0 |
| ShapeEnv.suppress_guards, ShapeEnv._get_sloc, torch._guards.SLoc | 2.13.0 |
| ShapeEnv.ignore_fresh_unbacked_symbols | 2.11-2.15.0 |
| torch.fx.experimental.symbolic_shapes.free_symbols, free_unbacked_symbols | 2.11-2.15.0 |
| the methods of SymNode that compute with two sizes, SymNode.fx_node, SymNode.pytype | 2.13.0 |
"""

from __future__ import annotations

import contextlib
import functools
import threading
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_symbols, free_unbacked_symbols
from torch.fx.traceback import get_current_meta

from torch2ort._torch.dispatch import is_fake as is_fake
from torch2ort.support.provenance import describe
from torch2ort.support.replaced import replaced
from torch2ort.support.source_lines import line_in
from torch2ort.support.versions import need, private_names

# Operations of two sizes, by the names of SymNode's methods.
_ARITHMETIC = (
    *("_add", "_sub", "_mul", "_sym_max", "_sym_min"),
    *("_eq", "_ne", "_ge", "_gt", "_le", "_lt", "_and_", "_or_"),
)

with private_names("torch"):
    from torch._guards import SLoc
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._sympy.printers import PythonPrinter

    need(SymNode, "hint", "expr", *_ARITHMETIC)
    need(FakeTensor, "fake_mode")
    need(FakeTensorMode, "shape_env")
    ASSERT = torch.ops.aten._assert_scalar.default
    need(ShapeEnv, "_get_sloc", "ignore_fresh_unbacked_symbols")
    need(ShapeEnv, "source_name_to_debug_name", "source_to_var", "create_symintnode", "suppress_guards")
    need(torch._C, "_select_conv_backend", "_conv_determine_backend_memory_format")


def size_hint(size: int | torch.SymInt) -> int:
    """Return the value of a symbolic size in the sample; 2 where it has none."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 2 if hint is None else int(hint)


def has_hint(size: int | torch.SymInt | torch.SymFloat | torch.SymBool) -> bool:
    """Return True if a size, or a value computed of sizes, has a value in the sample."""
    return isinstance(size, int) or size.node.hint is not None


def expression(size: torch.SymInt) -> sympy.Expr:
    """Return torch's expression of a symbolic size, over torch's own symbols."""
    return size.node.expr


def numbers(environment: Any) -> Mapping[sympy.Symbol, sympy.Integer]:
    """Return the value of each symbol of a trace in the sample."""
    known: Any = getattr(environment, "backed_var_to_val", None)
    return environment.var_to_val if known is None else known  # type: ignore[no-any-return]


def raw_expression(size: int | torch.SymInt | torch.SymFloat | torch.SymBool) -> sympy.Expr:
    """Return the expression of a size, or of a value computed of sizes, before torch's replacements."""
    return sympy.Integer(size) if isinstance(size, int) else size.node._expr


def environment(tensor: object) -> Any:
    """Return the ShapeEnv of the trace to which ``tensor`` belongs; ``None`` if it belongs to none."""
    return tensor.fake_mode.shape_env if isinstance(tensor, FakeTensor) else None


def unbound_values(environment: Any) -> contextlib.AbstractContextManager[Any]:
    """Context in which torch ignores the new symbols of values that are read out of fake tensors."""
    if environment is None:
        return contextlib.nullcontext()
    manager: contextlib.AbstractContextManager[Any] = environment.ignore_fresh_unbacked_symbols()
    return manager


@contextlib.contextmanager
def guards_taken_back(environment: Any) -> Iterator[list[Any]]:
    """Remove the conditions on sizes that are assumed inside of the block.

    Args:
        environment: the ShapeEnv of the trace; ``None`` for one without symbols.

    Yields:
        A list that is empty inside of the block, and contains those conditions after it.
    """
    taken: list[Any] = []
    if environment is None:
        yield taken
        return
    count, replacements = len(environment.guards), dict(environment.replacements)
    try:
        yield taken
    finally:
        taken += environment.guards[count:]
        if taken:
            del environment.guards[count:]
            environment.replacements.clear()
            environment.replacements.update(replacements)


def symbols_of(sizes: Iterable[Any]) -> set[sympy.Symbol]:
    """Return the symbols in some sizes."""
    return {symbol for size in sizes for symbol in free_symbols(size)}


def is_value(size: Any, known: Container[sympy.Symbol]) -> bool:
    """Return True if a number depends on a value inside of a tensor, by a symbol that is not ``known``."""
    symbolic = isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return symbolic and any(symbol not in known for symbol in free_unbacked_symbols(size))


def num_unbacked_sizes(environment: Any) -> int:
    """Return the number of data-dependent sizes that a trace has created so far."""
    return int(environment.unbacked_symint_counter)


def guards(environment: Any) -> list[sympy.Expr]:
    """Return the conditions on input sizes that a trace has assumed so far, in order."""
    return [guard.expr for guard in environment.guards]


def guard_lines(environment: Any) -> list[str]:
    """Return the model's line that each of :func:`guards` comes from; empty where it is unknown."""
    return [guard.sloc.maybe_user_loc or "" for guard in environment.guards]


def size_sources(environment: Any) -> dict[str, str]:
    """Map the name of each symbol to the source of its size, as ``L['tensors'][0].size()[1]``."""
    return {str(symbol): str(source) for source, symbol in reversed(environment.source_to_var.items())}


def guards_with_lines() -> contextlib.AbstractContextManager[None]:
    """Let each condition on sizes record the model's line instead of the line of torch's operator."""
    find = ShapeEnv._get_sloc

    def found(self: ShapeEnv, framework_loc: str | None = None) -> SLoc:
        node = get_current_meta().get("stack_trace")
        line = describe(node) if node else line_in(traceback.extract_stack())
        return SLoc(find(self, framework_loc).framework_loc, line or None)

    return replaced(ShapeEnv, _get_sloc=found)


def kernels_chosen_unconditionally() -> contextlib.AbstractContextManager[None]:
    """Keep this thread's traces from adding conditions on sizes for the choice of a convolution's kernel.

    A fake convolution queries which kernel eager PyTorch would choose, as the result has that kernel's memory
    layout. With one thread, batches of 16 and more use another kernel than smaller ones; both compute the
    same.
    """
    choices = ("_select_conv_backend", "_conv_determine_backend_memory_format")
    before = {name: getattr(torch._C, name) for name in choices}
    tracing = threading.get_ident()

    def chosen(choose: Callable[..., Any], input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        known = environment(input) if threading.get_ident() == tracing else None
        with contextlib.nullcontext() if known is None else known.suppress_guards():
            return choose(input, *args, **kwargs)

    return replaced(torch._C, **{name: functools.partial(chosen, f) for name, f in before.items()})


def arithmetic_done_once() -> contextlib.AbstractContextManager[None]:
    """Let traces compute each sum, product or comparison of two symbolic sizes once.

    Each fake tensor computes its number of elements, its strides and whether it is contiguous. sympy
    computes them from the same few sizes each time, in a third of the time of a trace. A trace has a few
    hundred different operations. A graph that records operations on sizes still records each.
    """
    before = {name: getattr(SymNode, name) for name in _ARITHMETIC}
    done: dict[Any, SymNode] = {}

    def once(name: str, compute: Callable[[SymNode, SymNode], SymNode]) -> Callable[..., SymNode]:
        def found(one: SymNode, other: SymNode) -> SymNode:
            if get_proxy_mode() is not None or one.fx_node or other.fx_node:
                return compute(one, other)
            # A later replacement of torch in an expression applies to a cached result, too, when it is read.
            # A result holds its environment, so no other environment gets the same id.
            key = name, one._expr, other._expr, one.pytype, other.pytype, id(one.shape_env)
            result = done.get(key)
            if result is None:
                result = done[key] = compute(one, other)
            return result

        return found

    return replaced(SymNode, **{name: once(name, compute) for name, compute in before.items()})


def num_deferred_asserts(environment: Any) -> int:
    """Return the number of conditions on data-dependent sizes that a trace has assumed so far."""
    return int(environment.num_deferred_runtime_asserts)


def deferred_asserts(environment: Any) -> list[sympy.Expr]:
    """Return the assumed conditions on data-dependent sizes, over the sizes' original expressions."""
    return [one.expr for found in environment.deferred_runtime_asserts.values() for one in found]


def clear_deferred_asserts(environment: Any) -> None:
    """Drop the conditions that :func:`deferred_asserts` returns."""
    environment.deferred_runtime_asserts.clear()


def replace_symbols(environment: Any, names: Mapping[sympy.Symbol, sympy.Symbol]) -> None:
    """Replace some symbols of a trace by others that are equal, which torch does not find within a sum."""
    known = environment.replacements
    # Earlier replacements between the two would make a cycle.
    for symbol in [
        s for s, size in known.items() if s in names or not names.keys().isdisjoint(size.free_symbols)
    ]:
        del known[symbol]
    for symbol, other in names.items():
        environment._set_replacement(symbol, other, "the gradient of an output has the output's sizes")


def forget_new_sizes(environment: Any) -> None:
    """Drop the data-dependent sizes that an earlier trace created and no tensor of a later trace has.

    torch looks for each of them among the results of the next operator, and fails where one is missing.
    """
    environment.pending_fresh_unbacked_symbols.clear()


def bounds(size: torch.SymInt) -> tuple[int | None, int | None]:
    """Return the lower and the upper bound of a number of a trace; ``None`` for no bound."""
    found = size.node.shape_env.bound_sympy(size.node.expr)
    return tuple(int(end) if end.is_Integer else None for end in (found.lower, found.upper))  # type: ignore[return-value]


def python_text(expression: sympy.Expr, symbols: Mapping[str, str]) -> str:
    """Return a condition as Python code.

    Args:
        expression: over torch's symbols.
        symbols: name of a symbol -> its text.

    Raises:
        KeyError: a symbol has no text.
    """
    return str(_Printer(symbols).doprint(expression))


class _Printer(PythonPrinter):
    def __init__(self, symbols: Mapping[str, str]) -> None:
        super().__init__()
        self._texts = symbols

    def _print_Symbol(self, symbol: sympy.Symbol) -> str:  # noqa: N802 - sympy's name
        return self._texts[symbol.name]


def named_symbols(environment: Any) -> dict[sympy.Symbol, str]:
    """Map each symbol of a trace that is a named dimension to the name, or to the expression of names."""
    names = environment.source_name_to_debug_name
    return {
        variable: names[source]
        for source, variable in environment.source_to_var.items()
        if names.get(source) is not None and variable.is_Symbol
    }


def name_symbol(environment: Any, symbol: sympy.Symbol, name: str) -> None:
    """Let :func:`named_symbols` return ``name`` for a symbol that torch chose itself."""
    for source, variable in environment.source_to_var.items():
        if variable == symbol:
            environment.source_name_to_debug_name[source] = name


def size_of(symbol: sympy.Symbol, environment: Any) -> int | torch.SymInt:
    """Return the size with the expression ``symbol`` in a trace."""
    size: int | torch.SymInt = environment.create_symintnode(symbol, hint=None)
    return size
