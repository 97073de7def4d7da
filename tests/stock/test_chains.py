"""Functions that follow each other directly are one node of a session, with eager PyTorch's results."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

import torch2ort
from tests.stock.models import run
from tests.support.functions import Affine, Square
from torch2ort.pythonop.native import native


class Model(torch.nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.body = body

    def forward(self, x):
        return self.body(x + 1.0, self.weight) + 1.0


class Identity(torch.autograd.Function):
    """Its output is its argument."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)


class Keep(torch.autograd.Function):
    """Keeps its argument and its result in a class attribute."""

    kept: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx, x):
        y = x * 2.0
        if type(x) is torch.Tensor:
            Keep.kept = [x, y]
        return y


class Flip(torch.autograd.Function):
    """Its output is not contiguous."""

    @staticmethod
    def forward(ctx, x):
        return x.t() * 1.5


BODIES = {
    "one after the other": lambda x, w: Square.apply(Affine.apply(Square.apply(x), w)),
    "an argument returned": lambda x, w: Square.apply(Identity.apply(Identity.apply(x))),
    "an argument returned at the end": lambda x, w: Identity.apply(Identity.apply(Square.apply(x))),
    "kept tensors": lambda x, w: Keep.apply(Square.apply(Keep.apply(x))),
    "other strides": lambda x, w: Flip.apply(Flip.apply(Square.apply(Flip.apply(Flip.apply(x))))),
}


@pytest.mark.filterwarnings("ignore:.*shares memory:torch2ort.Torch2OrtWarning")
@pytest.mark.parametrize("rows", [3, 1 << 15], ids=["small", "large"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_chain_gives_eagers_results(body, rows):
    model = Model(body).eval()
    exported = torch2ort.export(model, torch.rand(rows, 4))
    session = exported.session()
    assert any(isinstance(callee, native.Chain) for callee in session.python_op_callees)
    for _ in range(3):
        x = torch.rand(rows, 4)
        expected = model(x).detach()
        torch.testing.assert_close(exported(x), expected)
        torch.testing.assert_close(run(session, x)[0], expected)


def test_what_a_member_keeps_stays_as_it_is():
    exported = torch2ort.export(
        Model(lambda x, w: Square.apply(Keep.apply(Square.apply(x)))), torch.rand(3, 4)
    )
    for _ in range(3):
        x = torch.rand(3, 4)
        exported(x)
        kept = Keep.kept
        exported(torch.rand(3, 4))
        torch.testing.assert_close(kept, [(x + 1.0) ** 2, (x + 1.0) ** 2 * 2.0])


def test_a_call_whose_value_is_read_twice_stays_apart():
    exported = torch2ort.export(Model(lambda x, w: Square.apply(y := Square.apply(x)) + y), torch.rand(3, 4))
    assert not any(isinstance(callee, native.Chain) for callee in exported.session().python_op_callees)


class Fail(torch.autograd.Function):
    """Raises if a flag is set."""

    error: ClassVar[Exception | None] = None

    @staticmethod
    def forward(ctx, x):
        if Fail.error is not None:
            raise Fail.error
        return x * 1.0


def test_an_exception_in_the_middle_of_a_chain_arrives_as_it_is(monkeypatch):
    model = Model(lambda x, w: Square.apply(Fail.apply(Square.apply(x))))
    exported = torch2ort.export(model, torch.rand(3, 4))
    monkeypatch.setattr(Fail, "error", KeyError("mine"))
    with pytest.raises(KeyError) as caught:
        exported(torch.rand(3, 4))
    assert caught.value is Fail.error
    monkeypatch.setattr(Fail, "error", None)
    x = torch.rand(3, 4)
    torch.testing.assert_close(exported(x), model(x).detach())
