"""A model's source text that tests change in one place, and keys of the models that it defines."""

from __future__ import annotations

import itertools
import linecache
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torch2ort import io_schema
from torch2ort.cache.key.key import Key, dependencies

SOURCE = '''
import enum
import functools
import math
import threading

import numpy as np
import torch
import torch.nn.functional as F


SCALE = 2.0
TABLE = {"a": [1, 2], "b": F.relu}


class Kind(enum.Enum):
    SOFT = 1
    HARD = 2


class Square(torch.autograd.Function):
    """Saves its input."""

    factor = 1.0

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * bias()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2.0 * x * grad


def bias():
    return 1.0


def deeper(x):
    return x + 1.5


def helper(x, by=3.0):
    return deeper(x) * by


def made(offset):
    def add(x):
        return x + offset

    return add


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args) * 1.25

    return wrapper


@decorated
def wrapped(x):
    return x - 0.5


class Options:
    limit = 4

    def __init__(self, width):
        self.width = width

    def get(self):
        return self.width * self.limit


class Net(torch.nn.Module):
    power = 2

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.last = torch.nn.Linear(4, 2)
        self.register_buffer("mask", torch.ones(4))
        self.gain = 0.75
        self.add = made(0.25)
        self.steps = [torch.tanh, functools.partial(torch.clamp, max=8.0)]
        self.options = Options(width=6)
        self.kind = Kind.SOFT
        self.array = np.array([1.0, 2.0])
        self.constant = torch.tensor([1.0, 2.0, 3.0, 4.0])
        self.names = {"x", "y", "z"}
        self.unread = threading.local()

    def __repr__(self):
        return "Net()"

    @property
    def shift(self):
        return 0.125

    @staticmethod
    def fold(x):
        return x.flip(-1)

    def named(self, x):
        return x * 7.0

    def forward(self, x, flag=True):
        h = helper(self.first(x)) * SCALE + self.gain
        h = Square.apply(self.add(h)) + wrapped(h)
        for step in self.steps:
            h = step(h)
        h = h * self.options.get() + self.shift + float(self.array.sum()) + self.constant * self.mask
        if self.kind is Kind.SOFT and flag and "x" in self.names:
            h = F.softmax(h, -1) ** self.power
        h = TABLE["b"](h) + TABLE["a"][0] + getattr(self, "named")(h)
        return self.last(self.fold(h)) + math.pi

    def save(self, path):
        with open(path, "wb") as stream:
            stream.write(b"not part of forward")


def make():
    torch.manual_seed(1)
    return Net()
'''

_numbers = itertools.count()


@contextmanager
def imported(source: str, name: str = "net") -> Iterator[types.ModuleType]:
    """The module that ``source`` makes, imported under ``name`` for as long as the context lasts."""
    module = types.ModuleType(name)
    module.__file__ = f"/nowhere/{name}_{next(_numbers)}.py"
    linecache.cache[module.__file__] = (len(source), None, source.splitlines(True), module.__file__)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        exec(compile(source, module.__file__, "exec"), vars(module))
        yield module
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before


def changed(before: str, after: str, source: str = SOURCE) -> str:
    """``source`` with one place changed."""
    assert source.count(before) == 1, f"{before!r} is there {source.count(before)} times"
    return source.replace(before, after)


def key_of(model: torch.nn.Module, *args: Any, sizes: Any = None, **settings: Any) -> Key:
    """The key of a call of ``model``; a tensor of 3 x 4 by default."""
    signature = io_schema.Signature.of(model.forward)
    tensors, schema = io_schema.flatten(signature.bind(args or (torch.zeros(3, 4),), {}))
    texts = sizes or [f"{list(t.shape)} {list(t.stride())}" for t in tensors]
    return dependencies(model, tensors, schema).key(texts, {"opset": 18, **settings})


def key_of_source(source: str, *args: Any) -> Key:
    """The key of the model that ``source`` makes."""
    with imported(source) as module:
        return key_of(module.make(), *args)
