"""The input sizes that a graph accepts.

A traced graph is valid for the sizes that satisfy the conditions that torch.export found during the trace:
fixed dimensions, ranges, and relations such as ``size(0, 1) % 4 == 0``. They are checked, never assumed.
"""

from __future__ import annotations

import ast
import operator
import reprlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch2ort.errors import ModelLoadError

Shapes = Sequence[Sequence[int]]

# No real condition on sizes comes near these limits; a text above them is meant to use up time or memory.
_MOST_BITS = 4096
_LONGEST_TEXT = 1 << 16


def _power(base: Any, exponent: Any) -> Any:
    """Return ``base ** exponent``; raise OverflowError if the result is too large."""
    if abs(exponent) * max(1, int(abs(base)).bit_length()) > _MOST_BITS:
        raise OverflowError(f"{base} ** {exponent} is not a condition on sizes")
    return base**exponent


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CALLS: dict[str, Callable[..., Any]] = {"max": max, "min": min}


class Sizes:
    """The sizes that one graph accepts.

    Args:
        names: name of each tensor input.
        dims: per input, each dimension's fixed size or the name of its symbol.
        ranges: symbol -> smallest and largest (``None``: unbounded) size.
        guards: conditions over ``size(input, dimension)``, as Python expressions.
        lines: guard -> the line of the model that it comes from, where that is known.

    Raises:
        ModelLoadError: a guard is not such an expression.
    """

    def __init__(
        self,
        names: Sequence[str],
        dims: Sequence[Sequence[int | str]],
        ranges: dict[str, tuple[int, int | None]],
        guards: Sequence[str],
        lines: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.names = tuple(names)
        self.dims = tuple(tuple(d) for d in dims)
        self.ranges = ranges
        self.guards = tuple(guards)
        self.lines = lines
        self._compiled = [(text, compile_condition(text)) for text in guards]
        self._accepted: set[tuple[tuple[int, ...], ...]] = set()

    def with_guards(self, conditions: Mapping[str, str]) -> Sizes:
        """Return these sizes with further guards (guard -> its line)."""
        guards = (*self.guards, *conditions)
        return Sizes(self.names, self.dims, self.ranges, guards, {**self.lines, **conditions})

    def conditions(self, shapes: Sequence[Sequence[Any]]) -> list[tuple[str, Any]]:
        """Return all conditions on the sizes of ``shapes``, each with its text; symbolic if the sizes are."""
        found: list[tuple[str, Any]] = []
        seen: dict[str, tuple[str, Any]] = {}
        for name, dims, shape in zip(self.names, self.dims, shapes, strict=True):
            for axis, (expected, given) in enumerate(zip(dims, shape, strict=True)):
                where = f"dimension {axis} of {name}"
                if isinstance(expected, int):
                    found.append((f"{where} is {expected}", given == expected))
                    continue
                low, high = self.ranges.get(expected, (0, None))
                first, known = seen.setdefault(expected, (where, given))
                found += [(f"{where} is {first}", given == known)] if first != where else []
                # A trace assumes that varying sizes are at least 2, but its graph is correct for smaller
                # ones, too.
                found += [(f"{where} is at least {low}", given >= low)] if low > 2 else []
                found += [] if high is None else [(f"{where} is at most {high}", given <= high)]
        return found + [(text, condition(shapes)) for text, condition in self._compiled]

    def mismatch(self, shapes: Shapes) -> str | None:
        """Return ``None`` if the graph accepts ``shapes``, else a sentence: expected, given, what to do."""
        key = tuple(tuple(s) for s in shapes)
        if key in self._accepted:
            return None
        sentence = self._first_mismatch(key)
        if sentence is None:
            self._accepted.add(key)
        return sentence

    def _first_mismatch(self, shapes: tuple[tuple[int, ...], ...]) -> str | None:
        seen: dict[str, tuple[int, str]] = {}
        for name, dims, shape in zip(self.names, self.dims, shapes, strict=True):
            if len(shape) != len(dims):
                return (
                    f"input '{name}': expected a tensor of rank {len(dims)}, got one of shape {list(shape)}"
                )
            for axis, (expected, given) in enumerate(zip(dims, shape, strict=True)):
                where = f"input '{name}', dimension {axis}"
                if isinstance(expected, int):
                    if expected != given:
                        return (
                            f"{where}: expected size {expected}, got {given}; export with dynamic_shapes if "
                            f"this size varies"
                        )
                    continue
                low, high = self.ranges.get(expected, (0, None))
                if given < low or (high is not None and given > high):
                    limit = f"at least {low}" if high is None else f"from {low} to {high}"
                    return (
                        f"{where}: expected a size ({expected}) {limit}, got {given}; export with other "
                        f"bounds of that Dim if such sizes occur"
                    )
                known, first = seen.setdefault(expected, (given, where))
                if known != given:
                    return (
                        f"{where}: expected size {known}, the same as {first}, got {given}; export with a "
                        f"Dim of its own if it varies by itself"
                    )
        for text, condition in self._compiled:
            try:
                holds = condition(shapes)
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                return f"input sizes {[list(s) for s in shapes]}: {text} cannot be computed ({error})"
            if not holds:
                line = self.lines.get(text)
                at = f" and as the model needs at {line}" if line else ""
                return (
                    f"input sizes {[list(s) for s in shapes]}: expected {text}, as it was for the "
                    f"sample{at}; export with a sample of these sizes"
                )
        return None


def compile_condition(text: str) -> Callable[[Shapes], Any]:
    """Return a guard as a function. The text is untrusted: only arithmetic and comparisons are accepted."""
    if type(text) is not str or len(text) > _LONGEST_TEXT:
        raise ModelLoadError(f"{reprlib.repr(text)} is not a condition on sizes")
    try:
        return _build(ast.parse(text, mode="eval").body)
    except (SyntaxError, KeyError, ValueError, RecursionError, MemoryError) as error:
        raise ModelLoadError(f"{reprlib.repr(text)} is not a condition on sizes ({error!r})") from error


def _build(node: ast.expr) -> Callable[[Shapes], Any]:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        value = node.value
        return lambda _: value
    if isinstance(node, ast.BinOp):
        return _pair(_BINARY[type(node.op)], _build(node.left), _build(node.right))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _pair(_BINARY[type(node.ops[0])], _build(node.left), _build(node.comparators[0]))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        operand, negate = _build(node.operand), isinstance(node.op, ast.USub)
        return lambda shapes: -operand(shapes) if negate else not operand(shapes)
    if isinstance(node, ast.BoolOp):
        parts, combine = [_build(v) for v in node.values], all if isinstance(node.op, ast.And) else any
        return lambda shapes: combine(part(shapes) for part in parts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        arguments = [_build(a) for a in node.args]
        if node.func.id == "size":
            tensor, axis = arguments
            return lambda shapes: shapes[tensor(shapes)][axis(shapes)]
        function = _CALLS[node.func.id]
        return lambda shapes: function(*(a(shapes) for a in arguments))
    raise ValueError(f"{type(node).__name__} is not allowed")


def _pair(
    combine: Callable[[Any, Any], Any], left: Callable[[Shapes], Any], right: Callable[[Shapes], Any]
) -> Callable[[Shapes], Any]:
    return lambda shapes: combine(left(shapes), right(shapes))
