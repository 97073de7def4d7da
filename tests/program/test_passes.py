"""docs/passes.md lists the passes over a program in the order in which they run."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torch2ort.differentiate import joint_trace
from torch2ort.symbolics import preparation

_PAGE = (Path(__file__).parents[2] / "docs" / "passes.md").read_text()
# These analyse a program without changing it.
_QUERIES = {
    "Prepared",
    "_needs_kernel",
    "_varying_sizes",
    "user_operators",
    "check",
    "_device_of",
    "carrying",
}


def _passes(function: Callable[..., Any]) -> Iterator[str]:
    """The names of the functions that a function calls, in the order of its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    module = inspect.getmodule(function)
    for call in sorted(calls, key=lambda n: (n.lineno, n.col_offset)):
        assert isinstance(call.func, ast.Name)
        if hasattr(module, call.func.id) and call.func.id not in _QUERIES:
            yield call.func.id


@pytest.mark.parametrize(
    "function", [preparation.check, joint_trace._prepared, preparation.prepare], ids=lambda f: f.__name__
)
def test_the_tables_list_the_passes_in_their_order(function: Callable[..., Any]) -> None:
    (section,) = re.findall(rf"^## [^\n]*\.{function.__name__}`\n(.*?)(?=^## |\Z)", _PAGE, re.M | re.S)
    assert re.findall(r"^\| `(\w+)` \|", section, re.M) == list(_passes(function))
