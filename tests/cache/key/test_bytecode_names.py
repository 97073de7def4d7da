"""Names that a code object uses, compared with those that the standard library's ``dis`` finds."""

from __future__ import annotations

import ast
import dis
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType

import pytest
import torch.nn.functional

from torch2ort.cache.key import bytecode_names as _code
from torch2ort.cache.key import functions_and_classes as _definitions
from torch2ort.cache.key.bytecode_names import uses_of


def compiled(text: str) -> CodeType:
    """The code of a function with this body."""
    module = compile(f"def f(x, y):\n{textwrap.indent(textwrap.dedent(text), '    ')}", "<test>", "exec")
    return next(constant for constant in module.co_consts if isinstance(constant, CodeType))


def parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from parts(constant)


def chains(code: CodeType) -> list[tuple[str, ...]]:
    """Globals and the attributes that are read from them directly, according to ``dis``."""
    found: list[tuple[str, ...]] = []
    for part in parts(code):
        grows = False
        for step in dis.get_instructions(part):
            name = str(step.argval)
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
                found.append((name,))
                grows = True
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and grows:
                found[-1] = (*found[-1], name)
            elif step.opname != "EXTENDED_ARG":
                grows = False
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("module", [torch.nn.functional, ast, _code, _definitions], ids=lambda m: m.__name__)
def test_the_chains_are_those_that_dis_shows(module: ModuleType) -> None:
    assert module.__file__ is not None
    code = compile(Path(module.__file__).read_text(encoding="utf-8"), module.__file__, "exec")

    assert list(uses_of(code).chains) == chains(code)


def test_names_are_right_in_a_function_with_more_of_them_than_fit_a_byte() -> None:
    many = "\n".join(f"g{i}.a{i}.b{i}(x)" for i in range(300))

    assert list(uses_of(compiled(many)).chains) == [(f"g{i}", f"a{i}", f"b{i}") for i in range(300)]


@pytest.mark.parametrize(
    ("text", "imports"),
    [
        ("import a.b", {"a.b": []}),
        ("import a.b as c", {"a.b": []}),
        ("from a.b import c, d as e", {"a.b": ["c", "d"]}),
        ("from . import a", {".": ["a"]}),
        ("from ..a import b\nimport c.d as e\nfrom f import g", {"..a": ["b"], "c.d": [], "f": ["g"]}),
    ],
)
def test_imports_are_told_with_their_level_and_what_they_take(
    text: str, imports: dict[str, list[str]]
) -> None:
    assert uses_of(compiled(text)).imports == imports


@pytest.mark.parametrize(
    ("text", "any_name"),
    [
        ("return getattr(x, 'a')", False),
        ("return getattr(x.b.c, 'a', None)", False),
        ("return getattr(x, 'a', y)", False),
        ("return hasattr(x, 'a')", False),
        ("return getattr(x, y)", True),
        ("return getattr(x, 'a' + y)", True),
        ("return getattr(x, 'a', y + 1)", True),
        ("return hasattr(x[0], y)", True),
        ("return getattr", True),
        ("return map(getattr, x, y)", True),
        ("return vars(x)", True),
        ("match x:\n    case int(a):\n        return a", True),
    ],
)
def test_an_attribute_of_any_name_may_be_read_where_its_name_is_no_constant(
    text: str, any_name: bool
) -> None:
    assert uses_of(compiled(text)).any_name == any_name
