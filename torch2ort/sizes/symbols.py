"""torch's symbolic sizes under the names of ``dynamic_shapes``, and back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch

from torch2ort._torch import symbolic_shapes as private
from torch2ort.sizes import expressions as sizes

bounds = private.bounds
environment_of = private.environment
expression_of = private.expression
guards_of = private.guards
has_hint = private.has_hint
is_value = private.is_value
raw_expression = private.raw_expression
size_hint = private.size_hint
symbols_of = private.symbols_of
unbound_values = private.unbound_values

# Per trace: sizes that a shape inferer gave a name to -> the key of the site that made it, and the size.
_named: weakref.WeakKeyDictionary[Any, dict[str, tuple[str, Any]]] = weakref.WeakKeyDictionary()
# Per trace: every symbol that such a size ever had. torch traces a program more than once.
_names: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()


def decided_sizes(tensors: Iterable[torch.Tensor]) -> Callable[[], int] | None:
    """What tells how many sizes that values decide there are by now, in the trace that tensors are of.

    Returns:
        The function; ``None`` if no tensor is fake.
    """
    for tensor in tensors:
        if private.is_fake(tensor):
            environment = private.environment(tensor)
            return lambda: 0 if environment is None else private.decided_sizes(environment)
    return None


def other_numbers(tensors: Sequence[torch.Tensor]) -> Callable[[int | torch.SymInt], int] | None:
    """What gives each size of some tensors in another sample of the model's: multiples of those in this one.

    Returns:
        The function; ``None`` if no size varies.
    """
    environment = next((private.environment(t) for t in tensors), None)
    sizes = [size for t in tensors for size in t.shape if not is_constant(size)]
    symbols = {s for size in sizes for s in expression_of(size).free_symbols}  # type: ignore[arg-type]
    known = {} if environment is None else private.numbers(environment)
    # Two symbols of one number become two numbers.
    others = {s: known[s] * (i + 2) for i, s in enumerate(sorted(symbols & known.keys(), key=str))}

    def number(size: int | torch.SymInt) -> int:
        found = sympy.Integer(size) if isinstance(size, int) else expression_of(size).xreplace(others)
        return int(found) if found.is_Integer else size_hint(size)

    return number if others else None


def is_constant(size: int | torch.SymInt) -> bool:
    """Whether a size is a number, also one that a symbol was taken for."""
    return isinstance(size, int) or bool(private.expression(size).is_number)


def is_number(value: object) -> bool:
    """Whether what a node of a program gives is a number, known or not."""
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def size_names(traced: torch.Tensor) -> dict[str, sympy.Expr]:
    """Name of torch's symbol -> what a graph calls it, for the trace that ``traced`` is of."""
    environment = private.environment(traced)
    if environment is None:
        return {}
    names = {
        str(variable): sizes.parse(name) for variable, name in private.named_symbols(environment).items()
    }
    return {**names, **{own: sizes.symbol(name) for own, name in _names.get(environment, {}).items()}}


def program_size_names(program: torch.export.ExportedProgram) -> dict[str, sympy.Expr]:
    """:func:`size_names` of the trace that gave ``program``."""
    for node in program.graph.nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            return size_names(node.meta["val"])
    return {}


def name_sizes(inputs: Sequence[torch.Tensor], names: Sequence[Mapping[int, str]]) -> bool:
    """Give sizes of a trace's inputs, which torch chose symbols for, the names of ``dynamic_shapes``.

    Args:
        inputs: of the trace.
        names: of each, dimension -> name.

    Returns:
        Whether the sizes vary as the names say; if not, none has got a name.
    """
    symbols: dict[str, sympy.Basic] = {}
    for tensor, named_dimensions in zip(inputs, names, strict=True):
        for dimension, name in named_dimensions.items():
            size = tensor.shape[dimension]
            symbol = None if isinstance(size, int) else private.expression(size)
            if not isinstance(symbol, sympy.Symbol) or symbols.setdefault(name, symbol) != symbol:
                return False
    if len(set(symbols.values())) < len(symbols):
        return False
    for name, symbol in symbols.items():
        private.name_symbol(private.environment(inputs[0]), symbol, name)
    return True


def named(size: int | torch.SymInt, names: Mapping[str, sympy.Expr]) -> int | str:
    """``size`` as a graph writes it."""
    return size if isinstance(size, int) else sizes.text(sizes.plain(private.expression(size), names))


def named_symbol(symbol: sympy.Basic, names: Mapping[str, sympy.Expr]) -> str:
    """A symbol of torch's as a graph writes it."""
    return sizes.text(sizes.plain(symbol, names))


class SizeSpace:
    """The sizes of one call's tensor arguments, as expressions of named symbols.

    Args:
        tensors: the arguments, fake.
        site_key: key of the call.
        new_size: makes a size that nothing is known of.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], site_key: str, new_size: Callable[[], torch.SymInt]
    ) -> None:
        self._site_key = site_key
        self._new_size = new_size
        self._environment = private.environment(tensors[0]) if tensors else None
        self._names = size_names(tensors[0]) if tensors else {}
        self._values: dict[str, Any] = {}
        # Those of the arguments as they are: of a view's size no dimension may have the symbol itself.
        self._given: dict[Any, Any] = {}
        for size in (d for t in tensors for d in t.shape if not isinstance(d, int)):
            expression = self.expression(size)
            self._given.setdefault(expression, size)
            if isinstance(expression, sympy.Symbol):
                self._values[expression.name] = self._given[expression]
        for given in self._given.values():
            for symbol in private.expression(given).free_symbols:
                self._note(symbol)

    def expression(self, size: int | torch.SymInt) -> int | sympy.Expr:
        """``size`` over named symbols; a number stays one."""
        if isinstance(size, int):
            return size
        return sizes.plain(private.expression(size), self._names)

    def size(self, dim: int | sympy.Expr | None) -> int | torch.SymInt:
        """The size that an expression stands for; a new one for ``None``.

        A name that the trace does not know becomes a new size, the same for every call that uses the
        name.
        """
        if dim is None:
            return self._new_size()
        if isinstance(dim, int):
            return dim
        if dim in self._given:
            known: torch.SymInt = self._given[dim]
            return known
        values = {s.name: self._value(s.name) for s in dim.free_symbols}
        size: int | torch.SymInt = sizes.evaluate(dim, values)
        return size

    def hint(self, dim: sympy.Expr) -> int | None:
        """The number that ``dim`` had in the sample; ``None`` where a symbol of it had none."""
        hints: dict[str, int] = {}
        for name in (s.name for s in dim.free_symbols):
            value = self._values.get(name)
            if value is None or not private.has_hint(value):
                return None
            hints[name] = private.size_hint(value)
        number: int = sizes.evaluate(dim, hints)
        return number

    def _note(self, symbol: sympy.Symbol) -> None:
        """Note the size that a symbol of the trace stands for, unless a dimension is that."""
        named = sizes.plain(symbol, self._names)
        if isinstance(named, sympy.Symbol) and named.name not in self._values:
            self._values[named.name] = private.size_of(symbol, self._environment)

    def _value(self, name: str) -> Any:
        if name not in self._values:
            self._values[name] = self._declared(name) or self._fresh(name)
        return self._values[name]

    def _declared(self, name: str) -> Any:
        """The size of a dimension of ``dynamic_shapes`` that is none of this call's."""
        if self._environment is None:
            return None
        for variable, declared in private.named_symbols(self._environment).items():
            if declared == name:
                return private.size_of(variable, self._environment)
        return None

    def _fresh(self, name: str) -> Any:
        if self._environment is None:
            return self._new_size()
        known = _named.setdefault(self._environment, {})
        owner, size = known.get(name, (self._site_key, None))
        # A site that is traced again makes its size again, for torch ties it to the site's node.
        if owner == self._site_key:
            size = self._new_size()
            known[name] = (self._site_key, size)
            _names.setdefault(self._environment, {})[str(private.expression(size))] = name
        return size
