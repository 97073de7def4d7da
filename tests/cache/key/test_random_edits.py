"""No stale hit: a model with another result has another key, whatever was edited in its source or objects."""

from __future__ import annotations

import ast
import contextlib
import functools
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.cache.model_source import SOURCE, imported, key_of
from torch2ort.cache.key.key import Unkeyable

X = torch.linspace(-1, 1, 12).reshape(3, 4)
# A part of each kind of edit; `make test-long` makes ten thousand in all.
PARTS = [pytest.param(part, marks=[pytest.mark.long] * (part > 0)) for part in range(50)]
EDITS = 100

OPERATORS: dict[type[ast.operator], list[type[ast.operator]]] = {
    ast.Add: [ast.Sub, ast.Mult],
    ast.Sub: [ast.Add],
    ast.Mult: [ast.Add, ast.Div],
    ast.Pow: [ast.Mult],
}
NAMES = {
    "tanh": "sin",
    "clamp": "clip",
    "softmax": "log_softmax",
    "relu": "gelu",
    "flip": "roll",
    "ones": "zeros",
}


class Edit(ast.NodeTransformer):
    """Changes one node, selected by its index among all nodes that an edit can change."""

    def __init__(self, at: int, chance: random.Random) -> None:
        self.at, self.chance, self.count = at, chance, 0

    def generic_visit(self, node: ast.AST) -> ast.AST:
        node = super().generic_visit(node)
        change = self._change(node)
        if change is None:
            return node
        self.count += 1
        return ast.copy_location(change(), node) if self.count - 1 == self.at else node

    def _change(self, node: ast.AST) -> Callable[[], ast.AST] | None:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return lambda: ast.Constant(node.value + self.chance.choice((1, 0.5, -1)))
        if isinstance(node, ast.Constant) and isinstance(node.value, (str, bool)):
            return lambda: ast.Constant(not node.value if isinstance(node.value, bool) else node.value + "x")
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            other = OPERATORS[type(node.op)]
            return lambda: ast.BinOp(node.left, self.chance.choice(other)(), node.right)
        if isinstance(node, ast.Attribute) and node.attr in NAMES:
            return lambda: ast.Attribute(node.value, NAMES[node.attr], node.ctx)
        if isinstance(node, ast.Return) and node.value is not None:
            return lambda: ast.Return(ast.BinOp(node.value, ast.Mult(), ast.Constant(2)))
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == "h"
        ):
            return lambda: ast.Assign(node.targets, ast.BinOp(node.value, ast.Add(), ast.Constant(1.0)))
        return None


def edited(chance: random.Random) -> str:
    """The model's source with one to three edits."""
    tree = ast.parse(SOURCE)
    for _ in range(chance.randint(1, 3)):
        counting = Edit(-1, chance)
        counting.visit(tree)
        tree = Edit(chance.randrange(counting.count), chance).visit(tree)
    return ast.unparse(ast.fix_missing_locations(tree))


def places(owner: Any, seen: set[int]) -> Iterator[tuple[Any, Callable[[Any], object]]]:
    """Each value that a model's own objects hold, with a function that replaces it."""
    if id(owner) in seen:
        return
    seen.add(id(owner))
    is_own = "net" in (getattr(owner, "__module__", None), type(owner).__module__)
    if isinstance(owner, (dict, list)):
        items, put = list(owner.items() if isinstance(owner, dict) else enumerate(owner)), owner.__setitem__
    elif isinstance(owner, types.FunctionType) and is_own:
        yield from places_of_function(owner)
        return
    elif is_own or (isinstance(owner, types.ModuleType) and owner.__name__ == "net"):
        items = [(name, value) for name, value in vars(owner).items() if not name.startswith("__")]
        put = functools.partial(setattr, owner)
    else:
        return
    for name, value in items:
        yield value, functools.partial(put, name)
        yield from places(value, seen)


def places_of_function(function: types.FunctionType) -> Iterator[tuple[Any, Callable[[Any], object]]]:
    """Each value among a function's defaults and variables, with a function that replaces it."""
    defaults = function.__defaults__ or ()

    def put(at: int, value: Any) -> None:
        function.__defaults__ = (*defaults[:at], value, *defaults[at + 1 :])

    for i, value in enumerate(defaults):
        yield value, functools.partial(put, i)
    for cell in function.__closure__ or ():
        yield cell.cell_contents, functools.partial(setattr, cell, "cell_contents")


def other_than(value: Any, chance: random.Random) -> Any:
    """Another value of the same kind; the value itself where there is none."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + chance.choice((1, 0.5, -1))
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        return value + chance.choice((1.0, 0.5))
    if isinstance(value, np.ndarray):
        return value * 2
    if isinstance(value, set) and value:
        return value - {chance.choice(sorted(value))}
    if isinstance(value, functools.partial):
        return functools.partial(value.func, max=0.5)
    if value is torch.tanh:
        return torch.sin
    return value


def outcome(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> Any:
    """Eager PyTorch's results with the weights of the unedited model, which are not part of a key."""
    if {k: v.shape for k, v in model.state_dict().items()} != {k: v.shape for k, v in weights.items()}:
        return "other weights"
    model.load_state_dict(weights)
    x = X.clone().requires_grad_()
    try:
        result = model(x)
        result.sum().backward()
    except Exception as error:
        return type(error).__name__
    return result.detach(), x.grad


def differs(one: Any, other: Any) -> bool:
    """Return True if two outcomes differ."""
    if isinstance(one, str) or isinstance(other, str):
        return one != other
    return not all(
        (a is None and b is None) or (a is not None and b is not None and a.equal(b))
        for a, b in zip(one, other, strict=True)
    )


def digest(model: torch.nn.Module) -> str | None:
    """The key; ``None`` where an export is not cached."""
    try:
        return key_of(model, X).digest
    except Unkeyable:
        return None


@pytest.fixture(scope="module")
def unedited() -> tuple[str | None, Any, dict[str, torch.Tensor]]:
    with imported(SOURCE) as module:
        model = module.make()
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return digest(model), outcome(model, weights), weights


def changes_the_result(model: torch.nn.Module, unedited: Any, edit: str) -> bool:
    """Return True if an edit changed the result; the key must then have changed too."""
    before, expected, weights = unedited
    found = digest(model)
    if not differs(outcome(model, weights), expected):
        return False
    assert found != before, f"a stale hit after {edit}"
    return True


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", PARTS)
def test_an_edit_of_the_source_that_changes_the_result_changes_the_key(part, unedited) -> None:
    changed = 0
    for seed in range(part * EDITS, (part + 1) * EDITS):
        source = edited(random.Random(seed))
        with contextlib.ExitStack() as stack:
            try:
                model = stack.enter_context(imported(source)).make()
            except Exception:
                continue  # the edited source defines no model
            changed += changes_the_result(model, unedited, f"seed {seed}:\n{source}")
    assert changed > EDITS / 20, "too few edits change anything"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", PARTS)
def test_an_edit_of_an_object_that_changes_the_result_changes_the_key(part, unedited) -> None:
    changed = 0
    for seed in range(part * EDITS, (part + 1) * EDITS):
        chance = random.Random(seed)
        with imported(SOURCE) as module:
            model = module.make()
            everything = [*places(module, set()), *places(model, set())]
            editable = [(v, put) for v, put in everything if other_than(v, random.Random(0)) is not v]
            value, put = chance.choice(editable)
            put(other_than(value, chance))
            edit = f"seed {seed}: another value than {value!r}"
            changed += changes_the_result(model, unedited, edit)
    assert changed > EDITS / 20, "too few edits change anything"
