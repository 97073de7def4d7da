"""Sizes as sympy expressions: text -> expression -> text, and their values.

A size is a plain expression over symbols that are named after the dimensions of ``dynamic_shapes``.
torch and onnx-shape-inference write the same size in different ways (``FloorDiv(n, 2)``, ``(n//2)``,
``floor(n/2)``); here it has one form.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from sympy.printing.str import StrPrinter


def symbol(name: str) -> sympy.Symbol:
    """Return the symbol called ``name``, always with the same assumptions: equal names are equal symbols."""
    return sympy.Symbol(name, integer=True, nonnegative=True)


def _floor_divide(a: Any, b: Any) -> Any:
    return sympy.floor(a / b)


def _ceiling_divide(a: Any, b: Any) -> Any:
    return sympy.ceiling(a / b)


# Functions by the names that Python, sympy and torch print them under.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("Max", "max"), sympy.Max),
    **dict.fromkeys(("Min", "min"), sympy.Min),
    **dict.fromkeys(("Mod", "PythonMod"), sympy.Mod),
    **dict.fromkeys(("FloorDiv", "CleanDiv"), _floor_divide),
    **dict.fromkeys(("floor", "FloorToInt"), sympy.floor),
    **dict.fromkeys(("ceiling", "CeilToInt"), sympy.ceiling),
    **dict.fromkeys(("IntTrueDiv", "FloatTrueDiv"), operator.truediv),
    "CeilDiv": _ceiling_divide,
    "PowByNatural": operator.pow,
    "TruncToInt": sympy.floor,
    "ToFloat": lambda x: x,
    "Identity": lambda x: x,
}

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: _floor_divide,
    ast.Mod: sympy.Mod,
    ast.Pow: operator.pow,
}


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> sympy.Expr:
    """Return the size that ``text`` denotes.

    >>> parse("2*batch + 1")
    2*batch + 1

    Raises:
        ValueError: ``text`` is not arithmetic over names and integers.
    """
    try:
        return _build(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{text!r} is no arithmetic of names and whole numbers") from error


def _build(node: ast.expr) -> sympy.Expr:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return sympy.Integer(node.value)
    if isinstance(node, (ast.Name, ast.Attribute)):
        return symbol(ast.unparse(node))
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_build(node.left), _build(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_build(node.operand)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _FUNCTIONS[node.func.id](*map(_build, node.args))
    raise ValueError(type(node).__name__)


class _Printer(StrPrinter):  # type: ignore[misc]
    """Printer of sizes as Python expressions."""

    def _print_floor(self, expr: Any) -> str:
        above, below = sympy.together(expr.args[0]).as_numer_denom()
        if below == 1:
            return f"floor({self._print(above)})"
        return f"{self._group(above)}//{self._group(below)}"

    def _print_ceiling(self, expr: Any) -> str:
        return f"-({self._print(sympy.floor(-expr.args[0]))})"

    def _print_Mod(self, expr: Any) -> str:  # noqa: N802
        a, b = expr.args
        return f"{self._group(a)}%{self._group(b)}"

    def _print_Max(self, expr: Any) -> str:  # noqa: N802
        return f"max({', '.join(map(self._print, expr.args))})"

    def _print_Min(self, expr: Any) -> str:  # noqa: N802
        return f"min({', '.join(map(self._print, expr.args))})"

    def _group(self, expr: Any) -> str:
        text: str = self._print(expr)
        return text if expr.is_Atom else f"({text})"

    def parenthesize(self, item: Any, level: int, strict: bool = False) -> str:
        # Printed as operators, these bind as loosely as a product.
        if isinstance(item, (sympy.floor, sympy.Mod)):
            return f"({self._print(item)})"
        text: str = super().parenthesize(item, level, strict)
        return text


def text(size: int | sympy.Expr) -> str:
    """Return ``size`` as a graph writes it, without spaces.

    >>> text(parse("seq + 1")), text(parse("(2*seq)//3"))
    ('seq+1', '(2*seq)//3')
    """
    printed: str = _Printer().doprint(sympy.sympify(size))
    return printed.replace(" ", "")


def plain(expr: sympy.Basic, names: Mapping[str, sympy.Expr]) -> sympy.Expr:
    """Return torch's ``expr`` without torch's own functions, its symbols replaced by the sizes in ``names``.

    Raises:
        ValueError: ``expr`` contains a function that sizes do not have here.
    """
    if expr.is_Symbol:
        return names.get(str(expr), symbol(str(expr)))
    if expr.is_Number:
        return expr
    args = [plain(a, names) for a in expr.args]
    if expr.is_Add or expr.is_Mul or expr.is_Pow:
        return expr.func(*args)
    try:
        return _FUNCTIONS[type(expr).__name__](*args)
    except KeyError:
        raise ValueError(f"the size {expr} holds {type(expr).__name__}, which cannot be written") from None


def evaluate(expr: sympy.Expr, values: Mapping[str, Any]) -> Any:
    """Return the value of ``expr``.

    Args:
        expr: a plain size.
        values: the int or ``torch.SymInt`` of each symbol, by name.

    Raises:
        KeyError: a symbol has no value.
        ValueError: the expression is not a size.
    """
    if expr.is_Symbol:
        return values[expr.name]
    if expr.is_Integer:
        return int(expr)
    if isinstance(expr, (sympy.floor, sympy.ceiling)):
        above, below = (evaluate(part, values) for part in sympy.together(expr.args[0]).as_numer_denom())
        return above // below if isinstance(expr, sympy.floor) else -((-above) // below)
    above, below = sympy.together(expr).as_numer_denom()
    if below != 1:
        # A size is an integer, so this division has no remainder.
        return evaluate(above, values) // evaluate(below, values)
    args = [evaluate(a, values) for a in expr.args]
    if expr.is_Add:
        return functools.reduce(operator.add, args)
    if expr.is_Mul:
        return functools.reduce(operator.mul, args)
    if expr.is_Pow:
        return args[0] ** args[1]
    if isinstance(expr, sympy.Mod):
        return args[0] % args[1]
    if isinstance(expr, sympy.Max):
        return functools.reduce(torch.sym_max, args)
    if isinstance(expr, sympy.Min):
        return functools.reduce(torch.sym_min, args)
    raise ValueError(f"{expr} is no size: it holds {type(expr).__name__}")
