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
| torch.ops.aten._assert_scalar, which torch.export adds for what it took of a size | 2.11-2.15.0 |
| torch._C._select_conv_backend, _conv_determine_backend_memory_format | 2.13.0 |
| ShapeEnv.backed_var_to_val, ShapeEnv.var_to_val where torch lacks that | 2.13.0 |
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

# Operations of two sizes, as SymNode has them.
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
    """The number that a symbolic size had in the sample; 2 where it has none."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 2 if hint is None else int(hint)


def has_hint(size: int | torch.SymInt | torch.SymFloat | torch.SymBool) -> bool:
    """Whether the sample says which number a size, or what is computed of sizes, was."""
    return isinstance(size, int) or size.node.hint is not None


def expression(size: torch.SymInt) -> sympy.Expr:
    """What torch knows of a symbolic size, over symbols of torch's own."""
    return size.node.expr


def numbers(environment: Any) -> Mapping[sympy.Symbol, sympy.Integer]:
    """What each symbol of a trace was in the sample."""
    known: Any = getattr(environment, "backed_var_to_val", None)
    return environment.var_to_val if known is None else known  # type: ignore[no-any-return]


def raw_expression(size: int | torch.SymInt | torch.SymFloat | torch.SymBool) -> sympy.Expr:
    """A size, or what is computed of sizes, as it was made, whatever torch took it for since."""
    return sympy.Integer(size) if isinstance(size, int) else size.node._expr


def environment(tensor: object) -> Any:
    """Where torch keeps the symbols of the trace that ``tensor`` is of; ``None`` if it is of none."""
    return tensor.fake_mode.shape_env if isinstance(tensor, FakeTensor) else None


def unbound_values(environment: Any) -> contextlib.AbstractContextManager[Any]:
    """Context in which values that are read out of fake tensors become no symbols of the trace."""
    if environment is None:
        return contextlib.nullcontext()
    manager: contextlib.AbstractContextManager[Any] = environment.ignore_fresh_unbacked_symbols()
    return manager


@contextlib.contextmanager
def guards_taken_back(environment: Any) -> Iterator[list[Any]]:
    """Take back what is assumed of sizes inside of the block.

    Args:
        environment: of the trace; ``None`` for one without symbols.

    Yields:
        Empty; behind the block those assumptions.
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
    """The symbols in some sizes."""
    return {symbol for size in sizes for symbol in free_symbols(size)}


def is_value(size: Any, known: Container[sympy.Symbol]) -> bool:
    """Whether a number depends on a value inside a tensor, by a symbol that is not ``known``."""
    symbolic = isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return symbolic and any(symbol not in known for symbol in free_unbacked_symbols(size))


def decided_sizes(environment: Any) -> int:
    """How many sizes that values decide were made in a trace by now."""
    return int(environment.unbacked_symint_counter)


def guards(environment: Any) -> list[sympy.Expr]:
    """The conditions on sizes of inputs that a trace relies on by now, in their order."""
    return [guard.expr for guard in environment.guards]


def guard_lines(environment: Any) -> list[str]:
    """Of each of :func:`guards` the line of the model that it comes from; empty where that is not known."""
    return [guard.sloc.maybe_user_loc or "" for guard in environment.guards]


def size_sources(environment: Any) -> dict[str, str]:
    """Name of a symbol -> the source of its size, as ``L['tensors'][0].size()[1]``."""
    return {str(symbol): str(source) for source, symbol in reversed(environment.source_to_var.items())}


def guards_with_lines() -> contextlib.AbstractContextManager[None]:
    """Have each condition on sizes note the line of the model, and not that of torch's operator."""
    find = ShapeEnv._get_sloc

    def found(self: ShapeEnv, framework_loc: str | None = None) -> SLoc:
        node = get_current_meta().get("stack_trace")
        line = describe(node) if node else line_in(traceback.extract_stack())
        return SLoc(find(self, framework_loc).framework_loc, line or None)

    return replaced(ShapeEnv, _get_sloc=found)


def kernels_chosen_unconditionally() -> contextlib.AbstractContextManager[None]:
    """Have this thread's traces note no condition on sizes for the kernel that eager gives a convolution to.

    A fake convolution asks for that kernel to lay its result out as the kernel does. With one thread a batch
    of 16 and more has another kernel than a smaller one, and both compute the same.
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
    """Have traces compute each sum, product or comparison of two sizes that vary once.

    Each fake tensor asks for its number of elements, its strides and whether it is contiguous, and sympy
    computes them of the same few sizes each time: a third of a trace. Sums of one trace have a few hundred
    different ones. A graph that records what is done with sizes records each.
    """
    before = {name: getattr(SymNode, name) for name in _ARITHMETIC}
    done: dict[Any, SymNode] = {}

    def once(name: str, compute: Callable[[SymNode, SymNode], SymNode]) -> Callable[..., SymNode]:
        def found(one: SymNode, other: SymNode) -> SymNode:
            if get_proxy_mode() is not None or one.fx_node or other.fx_node:
                return compute(one, other)
            # What torch replaces in an expression later it replaces in a result, too, whenever that is read.
            # And a result holds its environment, so that no other one gets the same id.
            key = name, one._expr, other._expr, one.pytype, other.pytype, id(one.shape_env)
            result = done.get(key)
            if result is None:
                result = done[key] = compute(one, other)
            return result

        return found

    return replaced(SymNode, **{name: once(name, compute) for name, compute in before.items()})


def asserts(environment: Any) -> int:
    """How many conditions on sizes that only a run tells it relies on by now."""
    return int(environment.num_deferred_runtime_asserts)


def assumed(environment: Any) -> list[sympy.Expr]:
    """The conditions on sizes that only a run tells, over sizes as they were made."""
    return [one.expr for found in environment.deferred_runtime_asserts.values() for one in found]


def forget_assumed(environment: Any) -> None:
    """Let go of the conditions that :func:`assumed` gives."""
    environment.deferred_runtime_asserts.clear()


def take_for_one(environment: Any, names: Mapping[sympy.Symbol, sympy.Symbol]) -> None:
    """Have a trace know that some symbols are names of others; by itself it does not see that in a sum."""
    known = environment.replacements
    # What it found of the one by the other would lead back.
    for symbol in [
        s for s, size in known.items() if s in names or not names.keys().isdisjoint(size.free_symbols)
    ]:
        del known[symbol]
    for symbol, other in names.items():
        environment._set_replacement(symbol, other, "the gradient of an output has the output's sizes")


def forget_new_sizes(environment: Any) -> None:
    """Let go of sizes that only a run tells, which an earlier trace made and no tensor of a later one has.

    torch looks for each of them among the results of the next operator, and fails where it is not there.
    """
    environment.pending_fresh_unbacked_symbols.clear()


def bounds(size: torch.SymInt) -> tuple[int | None, int | None]:
    """What a number of a trace is never below, and never above; ``None`` where it may be any."""
    found = size.node.shape_env.bound_sympy(size.node.expr)
    return tuple(int(end) if end.is_Integer else None for end in (found.lower, found.upper))  # type: ignore[return-value]


def python_text(expression: sympy.Expr, symbols: Mapping[str, str]) -> str:
    """A condition as Python writes it.

    Args:
        expression: over torch's symbols.
        symbols: name of a symbol -> what to write for it.

    Raises:
        KeyError: for a symbol there is no text.
    """
    return str(_Printer(symbols).doprint(expression))


class _Printer(PythonPrinter):
    def __init__(self, symbols: Mapping[str, str]) -> None:
        super().__init__()
        self._texts = symbols

    def _print_Symbol(self, symbol: sympy.Symbol) -> str:  # noqa: N802 - sympy's name
        return self._texts[symbol.name]


def named_symbols(environment: Any) -> dict[sympy.Symbol, str]:
    """Symbols of one trace that stand for a named dimension -> the name, or the expression of names."""
    names = environment.source_name_to_debug_name
    return {
        variable: names[source]
        for source, variable in environment.source_to_var.items()
        if names.get(source) is not None and variable.is_Symbol
    }


def name_symbol(environment: Any, symbol: sympy.Symbol, name: str) -> None:
    """Have :func:`named_symbols` give ``name`` for a symbol that torch chose itself."""
    for source, variable in environment.source_to_var.items():
        if variable == symbol:
            environment.source_name_to_debug_name[source] = name


def size_of(symbol: sympy.Symbol, environment: Any) -> int | torch.SymInt:
    """The size that ``symbol`` stands for in a trace."""
    size: int | torch.SymInt = environment.create_symintnode(symbol, hint=None)
    return size
