"""Calls whose exceptions the model's code catches: a graph follows only the path of its sample."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch

from torch2ort.errors import EngineError, ExportError

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
# torch's code raises the exceptions that it catches again.
_TORCH = os.path.dirname(torch.__file__)
_Place = tuple[str, int]
_TRIES: Any = tuple(getattr(ast, name) for name in ("Try", "TryStar") if hasattr(ast, name))


class ExceptClause(NamedTuple):
    """An ``except`` clause around a call, for one of the classes that it catches.

    Attributes:
        catches: ``module.qualname`` of the class.
        place: file and line of the clause.
    """

    catches: str
    place: str


def places_above(frame: FrameType | None) -> list[_Place]:
    """Return file and line of the active calls, up to the one that torch2ort traces."""
    places: list[_Place] = []
    inside = False
    while frame is not None:
        file = frame.f_code.co_filename
        ours = file.startswith(_PACKAGE)
        if ours and inside:
            break
        if not ours:
            inside = True
            if not file.startswith(_TORCH):
                places.append((file, frame.f_lineno))
        frame = frame.f_back
    return places


def handlers_around(places: Iterable[_Place]) -> tuple[ExceptClause, ...]:
    """Return the ``except`` clauses that catch an exception at these places, and do not raise it again."""
    return tuple(handler for file, line in places for handler in _handlers_at(file, line))


@functools.lru_cache(maxsize=4096)
def _handlers_at(file: str, line: int) -> tuple[ExceptClause, ...]:
    found = []
    for first, last, expressions, at in _tries_in(file):
        if first <= line <= last:
            place = f"{os.path.basename(file)}:{at}"
            found += [ExceptClause(name, place) for e in expressions for name in _names_of(e, file)]
    return tuple(found)


@functools.lru_cache(maxsize=256)
def _tries_in(file: str) -> tuple[tuple[int, int, tuple[ast.expr | None, ...], int], ...]:
    """Return each guarded block's first and last line, the caught classes, and the handler's line."""
    with contextlib.suppress(SyntaxError, ValueError):
        tree = ast.parse("".join(linecache.getlines(file)))
        return tuple(entry for node in ast.walk(tree) for entry in _entries(node))
    return ()


def _entries(node: ast.AST) -> Iterator[tuple[int, int, tuple[ast.expr | None, ...], int]]:
    if isinstance(node, (ast.With, ast.AsyncWith)):
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("suppress", "contextlib.suppress"):
                yield *_lines(node.body), tuple(call.args), node.lineno
    elif isinstance(node, _TRIES):
        for handler in node.handlers:
            if not isinstance(handler.body[-1], ast.Raise):
                yield *_lines(node.body), (handler.type,), handler.lineno


def _lines(body: list[ast.stmt]) -> tuple[int, int]:
    return body[0].lineno, body[-1].end_lineno or body[-1].lineno


def _names_of(expression: ast.expr | None, file: str) -> list[str]:
    """Return the names of the classes that an ``except`` catches; BaseException if it names none."""
    if expression is None:
        return [_name(BaseException)]
    modules = (m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == file)
    names = {**vars(builtins), **vars(next(modules, sys.modules["__main__"]))}
    parts = expression.elts if isinstance(expression, ast.Tuple) else [expression]
    # A local name of the function may be any exception.
    kinds = [_looked_up(part, names) or Exception for part in parts]
    found = [kind for held in kinds for kind in (held if isinstance(held, tuple) else (held,))]
    return [_name(kind) for kind in found if isinstance(kind, type)]


def _looked_up(expression: ast.expr, names: dict[str, Any]) -> Any:
    if isinstance(expression, ast.Attribute):
        return getattr(_looked_up(expression.value, names), expression.attr, None)
    return names.get(expression.id) if isinstance(expression, ast.Name) else None


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def with_caught_exceptions_reported(
    caller: str, handlers: tuple[ExceptClause, ...], function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return ``function`` with exceptions that the model catches converted to an error about ``caller``."""

    @functools.wraps(function)
    def telling(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            place = _place_of(error, handlers)
            if place is None:
                raise
            said = f"{_said(error)}, which the model's code catches at {place}"
            raise EngineError(f"{caller} {said}. {_WAY_OUT}") from error

    return telling


def refuse_caught(name: str, error: BaseException) -> ExportError:
    """Return the error for a model that caught an exception of a Function on its sample."""
    return ExportError(
        f"{name}.forward {_said(error)} on the sample, and the model's code catches it. {_WAY_OUT}"
    )


_WAY_OUT = (
    "A graph has one way for all inputs, that of its sample. Catch the exception inside of a "
    "torch.autograd.Function, or decide by torch.where"
)


def _said(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"raised {type(error).__name__}{f' ({text})' if text else ''}"


def _place_of(error: BaseException, handlers: tuple[ExceptClause, ...]) -> str | None:
    kinds = {_name(kind) for kind in type(error).__mro__}
    return next((handler.place for handler in handlers if handler.catches in kinds), None)
