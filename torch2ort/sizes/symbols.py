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

# Per trace: the name that a shape inferer gave to a size -> the key of the site that made the size, and the
# size.
_named: weakref.WeakKeyDictionary[Any, dict[str, tuple[str, Any]]] = weakref.WeakKeyDictionary()
# Per trace: each symbol that such a size has had -> its name. torch traces a program more than once.
_names: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()


def unbacked_size_counter(tensors: Iterable[torch.Tensor]) -> Callable[[], int] | None:
    """Return a function that counts the data-dependent sizes made so far in the trace of some tensors.

    Returns:
        The function; ``None`` if no tensor is fake.
    """
    for tensor in tensors:
        if private.is_fake(tensor):
            environment = private.environment(tensor)
            return lambda: 0 if environment is None else private.num_unbacked_sizes(environment)
    return None


def other_numbers(tensors: Sequence[torch.Tensor]) -> Callable[[int | torch.SymInt], int] | None:
    """Return a function from each size of some tensors to that in another sample, a multiple of it.

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
    """Return True if a size is a number, or a symbol that the trace replaced by a number."""
    return isinstance(size, int) or bool(private.expression(size).is_number)


def is_number(value: object) -> bool:
    """Return True if the result of a program's node is a number, known or symbolic."""
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def size_names(traced: torch.Tensor) -> dict[str, sympy.Expr]:
    """Return name of torch's symbol -> its expression in a graph, for the trace of ``traced``."""
    environment = private.environment(traced)
    if environment is None:
        return {}
    names = {
        str(variable): sizes.parse(name) for variable, name in private.named_symbols(environment).items()
    }
    return {**names, **{own: sizes.symbol(name) for own, name in _names.get(environment, {}).items()}}


def program_size_names(program: torch.export.ExportedProgram) -> dict[str, sympy.Expr]:
    """Return :func:`size_names` of the trace that made ``program``."""
    for node in program.graph.nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            return size_names(node.meta["val"])
    return {}


def name_sizes(inputs: Sequence[torch.Tensor], names: Sequence[Mapping[int, str]]) -> bool:
    """Give the sizes of a trace's inputs, for which torch chose symbols, the names of ``dynamic_shapes``.

    Args:
        inputs: the inputs of the trace.
        names: for each input, dimension -> name.

    Returns:
        True if the sizes vary as the names say. Otherwise no size was named.
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
    """Return ``size`` as a graph writes it."""
    return size if isinstance(size, int) else sizes.text(sizes.plain(private.expression(size), names))


def named_symbol(symbol: sympy.Basic, names: Mapping[str, sympy.Expr]) -> str:
    """Return a symbol of torch as a graph writes it."""
    return sizes.text(sizes.plain(symbol, names))


class SizeSpace:
    """The sizes of one call's tensor arguments, as expressions of named symbols.

    Args:
        tensors: the arguments, fake.
        site_key: key of the call.
        new_size: makes a size about which nothing is known.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], site_key: str, new_size: Callable[[], torch.SymInt]
    ) -> None:
        self._site_key = site_key
        self._new_size = new_size
        self._environment = private.environment(tensors[0]) if tensors else None
        self._names = size_names(tensors[0]) if tensors else {}
        self._values: dict[str, Any] = {}
        # The arguments' own sizes by expression: no dimension need have a symbol of a view's size by itself.
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
        """Return ``size`` over named symbols; a number is returned unchanged."""
        if isinstance(size, int):
            return size
        return sizes.plain(private.expression(size), self._names)

    def size(self, dim: int | sympy.Expr | None) -> int | torch.SymInt:
        """Return the size that an expression denotes; a new one for ``None``.

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
        """Return the number that ``dim`` had in the sample; ``None`` if one of its symbols had none."""
        hints: dict[str, int] = {}
        for name in (s.name for s in dim.free_symbols):
            value = self._values.get(name)
            if value is None or not private.has_hint(value):
                return None
            hints[name] = private.size_hint(value)
        number: int = sizes.evaluate(dim, hints)
        return number

    def _note(self, symbol: sympy.Symbol) -> None:
        """Record the size of a symbol of the trace, unless the symbol is itself the size of a dimension."""
        named = sizes.plain(symbol, self._names)
        if isinstance(named, sympy.Symbol) and named.name not in self._values:
            self._values[named.name] = private.size_of(symbol, self._environment)

    def _value(self, name: str) -> Any:
        if name not in self._values:
            self._values[name] = self._declared_size(name) or self._fresh(name)
        return self._values[name]

    def _declared_size(self, name: str) -> Any:
        """Return the size of a dimension of ``dynamic_shapes`` that no argument of this call has."""
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
        # A site that is traced again makes a new size, because torch ties the size to the site's node.
        if owner == self._site_key:
            size = self._new_size()
            known[name] = (self._site_key, size)
            _names.setdefault(self._environment, {})[str(private.expression(size))] = name
        return size
