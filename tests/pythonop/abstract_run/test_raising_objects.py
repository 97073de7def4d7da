"""Objects whose own methods raise, in attributes of a model and arguments of a Function."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import torch2ort
from tests.support.comparison import assert_same


class Double(torch.autograd.Function):
    held: Any = None

    @staticmethod
    def forward(ctx, x):
        ctx.held = Double.held
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class Holding(nn.Module):
    """Holds objects, of which it reads the first item of tuples as Python stores it."""

    def __init__(self, held: list[Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.held = held

    def forward(self, x):
        first = sum(tuple.__getitem__(held, 0) for held in self.held if isinstance(held, tuple))
        return Double.apply(self.layer(x)) * first


def refuse(*_: object) -> NoReturn:
    raise NotImplementedError("nobody asks me")


VALUES: dict[type, tuple[Any, ...]] = {
    object: (), tuple: ((3, 2),), list: ((3, 2),), dict: ({"a": 3},), set: ((3, 2),), frozenset: ((3, 2),),
}  # fmt: skip
METHODS = ("__len__", "__iter__", "__eq__", "__hash__", "__bool__", "__getattr__", "__contains__", "__repr__")


def raising(base: type) -> Any:
    """An object of a class on top of ``base`` whose methods raise."""
    methods = METHODS if base is object else (*METHODS, "keys", "items", "values", "__getitem__", "copy")
    return type(f"Raising{base.__name__.title()}", (base,), dict.fromkeys(methods, refuse))(*VALUES[base])


def test_objects_whose_methods_raise_are_no_obstacle_to_a_step(monkeypatch: pytest.MonkeyPatch):
    held = [raising(base) for base in VALUES]
    monkeypatch.setattr(Double, "held", held)
    model = Holding(held)
    x = torch.randn(2, 4)
    assert_same(torch2ort.ORTModule(model)(x), model(x), "result")


def test_objects_whose_methods_raise_are_no_obstacle_to_an_export():
    model = Holding([raising(base) for base in VALUES])
    x = torch.randn(2, 4)
    assert_same(torch2ort.export(model, x)(x), model(x), "result")


def test_an_object_that_does_not_tell_its_class_is_refused_by_name():
    model = Holding([type("Hiding", (), {"__class__": property(refuse)})()])
    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.export(model, torch.randn(2, 4))
    assert str(caught.value) == (
        "looking at Holding.held[0] raised NotImplementedError: nobody asks me. Keep such objects out of "
        "what forward reads"
    )
