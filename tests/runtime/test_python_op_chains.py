"""Functions that follow each other directly are one node, and behave as separate ones."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import onnx
import pytest
import torch

import torch2ort
from tests.support.comparison import assert_same, assert_trains_like_eager
from tests.support.functions import Affine, Square, Sum, TwoOutputs
from tests.support.sweeps import sample_cases


class Model(torch.nn.Module):
    """A weight in front of some calls of Functions."""

    def __init__(self, body: Callable[[torch.Tensor, torch.nn.Parameter], Any]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.body = body

    def forward(self, x):
        return self.body(x * self.weight, self.weight)


def batches() -> list[tuple[torch.Tensor]]:
    return [(torch.rand(n, 4),) for n in (3, 5)]


def calls(model: torch.nn.Module, folder: Path, *, backward: bool = False) -> list[str]:
    """Names of the Functions that each PythonOp or PythonOpGrad of the session's graph calls."""
    ort = torch2ort.ORTModule(copy.deepcopy(model), options=torch2ort.Options(save_onnx_dir=folder))
    ort(torch.randn(3, 4)).square().sum().backward()
    (file,) = folder.glob(f"*_{'backward' if backward else 'forward'}.onnx")
    comments = [
        attribute.s.decode()
        for node in onnx.load(file).graph.node
        for attribute in node.attribute
        if node.op_type == ("PythonOpGrad" if backward else "PythonOp") and attribute.name == "func_name"
    ]
    return [", ".join(name.rpartition(".")[2] for name in comment.split(", ")) for comment in comments]


class Scale(torch.autograd.Function):
    """A tensor between constants, as second argument."""

    @staticmethod
    def forward(ctx, factor, x, name):
        assert name == "scale"
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return None, grad * ctx.factor, None


class StraightThrough(torch.autograd.Function):
    """Returns the incoming gradient unchanged."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Overwrite(torch.autograd.Function):
    """Writes to the incoming gradient."""

    @staticmethod
    def forward(ctx, x):
        return x * 3.0

    @staticmethod
    def backward(ctx, grad):
        return grad.mul_(3.0)


class Product(torch.autograd.Function):
    """The product of two arguments."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y, grad * x


class Saved(torch.autograd.Function):
    """Its gradient is a tensor that it saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0]


class Transposed(torch.autograd.Function):
    """Its output and its gradient are not contiguous."""

    @staticmethod
    def forward(ctx, x):
        return x.t() * 2.0

    @staticmethod
    def backward(ctx, grad):
        return grad.t() * 2.0


class Wider(torch.autograd.Function):
    """Its gradient is larger than its argument, and of another dtype, which autograd corrects."""

    @staticmethod
    def forward(ctx, x):
        return x * 2.0

    @staticmethod
    def backward(ctx, grad):
        return (grad * 2.0).double().expand(2, *grad.shape)


class Returned(torch.autograd.Function):
    """Its output is its argument."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.view_as(grad)


JOINED = {
    "one after the other": (
        lambda x, w: Square.apply(Square.apply(Square.apply(x))),
        ["Square, Square, Square"],
    ),
    "more arguments": (
        lambda x, w: Scale.apply(0.5, Affine.apply(Square.apply(Affine.apply(x, w)), w), "scale"),
        ["Affine, Square, Affine, Scale"],
    ),
    "two outputs at the end": (
        lambda x, w: sum(TwoOutputs.apply(Square.apply(x))),
        ["Square, TwoOutputs"],
    ),
    "a gradient passed on": (
        lambda x, w: Square.apply(StraightThrough.apply(StraightThrough.apply(x))),
        ["StraightThrough, StraightThrough, Square"],
    ),
    "gradients written to": (
        lambda x, w: Square.apply(Overwrite.apply(Overwrite.apply(Square.apply(x)))),
        ["Square, Overwrite, Overwrite, Square"],
    ),
    "one gradient for two arguments": (
        lambda x, w: Sum.apply(Overwrite.apply(x), w.expand_as(x)),
        ["Overwrite, Sum"],
    ),
    "one gradient for two arguments, inside": (
        lambda x, w: Square.apply(Sum.apply(Overwrite.apply(x), w.expand_as(x))),
        ["Overwrite, Sum, Square"],
    ),
    "the runtime's gradient passed on": (
        lambda x, w: StraightThrough.apply(Overwrite.apply(x)) + w,
        ["Overwrite, StraightThrough"],
    ),
    "a saved tensor as gradient": (
        lambda x, w: Square.apply(Saved.apply(Overwrite.apply(Saved.apply(x)))),
        ["Saved, Overwrite, Saved, Square"],
    ),
    "other strides": (
        lambda x, w: Square.apply(Transposed.apply(Transposed.apply(x))),
        ["Transposed, Transposed, Square"],
    ),
    "a gradient of another shape and dtype": (
        lambda x, w: Wider.apply(Wider.apply(Square.apply(x))),
        ["Square, Wider, Wider"],
    ),
    "arguments returned": (
        lambda x, w: Square.apply(Returned.apply(Returned.apply(x))),
        ["Returned, Returned, Square"],
    ),
    "an argument returned at the end": (
        lambda x, w: Returned.apply(Returned.apply(Square.apply(x))),
        ["Square, Returned, Returned"],
    ),
    "without gradients": (
        lambda x, w: x * Square.apply(Square.apply(w.detach())),
        ["Square, Square"],
    ),
    "a gradient for one alone": (
        lambda x, w: Product.apply(Square.apply(x.detach()), x),
        ["Square, Product"],
    ),
}

APART = {
    "a value read twice": (lambda x, w: Square.apply(y := Square.apply(x)) + y, ["Square", "Square"]),
    "a value returned": (lambda x, w: (y := Square.apply(x), Square.apply(y)), ["Square", "Square"]),
    "both arguments": (lambda x, w: Product.apply(y := Square.apply(x), y), ["Square", "Product"]),
    "an operator between": (lambda x, w: Square.apply(Square.apply(x).sin()), ["Square", "Square"]),
    "a call between": (
        lambda x, w: Affine.apply(Square.apply(x), Square.apply(w)),
        ["Square", "Square, Affine"],
    ),
}


@pytest.mark.filterwarnings("ignore:.*shares memory:torch2ort.Torch2OrtWarning")
@pytest.mark.parametrize(
    ("body", "expected"), sample_cases([*JOINED.values(), *APART.values()], 5), ids=[*JOINED, *APART]
)
def test_chains_train_like_eager(body, expected, tmp_path):
    model = Model(body)
    if isinstance(model(torch.randn(3, 4)), torch.Tensor):
        assert calls(model, tmp_path) == expected
    assert_trains_like_eager(model, batches(), steps=4, lr=0.01)


BACKWARD = {
    "one after the other": (
        lambda x, w: Square.apply(Affine.apply(Square.apply(x), w)),
        ["Square, Affine, Square"],
    ),
    "an operator that hands the gradient on": (
        lambda x, w: Square.apply(Square.apply(x) + 1.0),
        ["Square, Square"],
    ),
    "an operator with a derivative between": (
        lambda x, w: Square.apply(Square.apply(x).sin()),
        ["Square", "Square"],
    ),
    "two gradients of one value": (lambda x, w: Square.apply(y := Square.apply(x)) + y, ["Square", "Square"]),
    "gradients of both arguments": (
        lambda x, w: Product.apply(y := Square.apply(x), y),
        ["Product", "Square"],
    ),
    "a value returned": (lambda x, w: (y := Square.apply(x), Square.apply(y)), ["Square", "Square"]),
    "branches": (
        lambda x, w: Product.apply(Square.apply(x), Square.apply(w.expand_as(x))),
        ["Square, Product", "Square"],
    ),
}


@pytest.mark.parametrize(("body", "expected"), BACKWARD.values(), ids=BACKWARD)
def test_backwards_that_follow_each_other_are_one_node(body, expected, tmp_path):
    model = Model(lambda x, w: sum(y) if isinstance(y := body(x, w), tuple) else y)
    assert calls(model, tmp_path, backward=True) == expected
    assert_trains_like_eager(model, batches(), steps=3, lr=0.01)


class Watch(torch.autograd.Function):
    """Records in backward whether tensors that later calls saved are still alive."""

    saved: ClassVar[list[weakref.ref[torch.Tensor]]] = []
    alive: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx, x):
        result = x * 2.0
        if type(x) is torch.Tensor:
            ctx.save_for_backward(kept := x + 1.0)
            Watch.saved.append(weakref.ref(kept))
        return result

    @staticmethod
    def backward(ctx, grad):
        Watch.alive.append(sum(tensor() is not None for tensor in Watch.saved))
        return grad * 2.0


def test_what_a_member_saved_is_freed_before_the_next_backward(monkeypatch):
    model = Model(lambda x, w: Watch.apply(Watch.apply(Watch.apply(x))))
    for module in (model, torch2ort.ORTModule(copy.deepcopy(model))):
        module(torch.rand(3, 4)).sum().backward()
        monkeypatch.setattr(Watch, "saved", [])
        monkeypatch.setattr(Watch, "alive", [])
        module(torch.rand(3, 4)).sum().backward()
        assert Watch.alive == [3, 2, 1]


def test_a_chain_runs_after_the_values_that_its_later_members_take():
    model = Model(lambda x, w: Affine.apply(Square.apply(x), (w + 1.0).sin()))
    assert_trains_like_eager(model, batches(), steps=4, lr=0.01)


class Fail(torch.autograd.Function):
    """Raises in the direction that a flag names."""

    where: ClassVar[str] = ""
    error: ClassVar[Exception] = KeyError("mine")

    @staticmethod
    def forward(ctx, x):
        if Fail.where == "forward":
            raise Fail.error
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        if Fail.where == "backward":
            raise Fail.error
        return grad * 1.0


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_the_middle_of_a_chain_arrives_as_it_is(where, monkeypatch):
    model = Model(lambda x, w: Square.apply(Fail.apply(Square.apply(x))))
    ort = torch2ort.ORTModule(copy.deepcopy(model))
    x = torch.randn(3, 4)
    ort(x).sum().backward()
    monkeypatch.setattr(Fail, "where", where)
    with pytest.raises(KeyError) as caught:
        ort(x).sum().backward()
    assert caught.value is Fail.error
    monkeypatch.setattr(Fail, "where", "")
    for module in (model, ort):
        module.zero_grad()
        module(x).sum().backward()
    assert_same(ort.weight.grad, model.weight.grad, "gradient")


class Hoard(torch.autograd.Function):
    """Keeps all of its arguments and results."""

    values: ClassVar[list[tuple[torch.Tensor, torch.Tensor]]] = []

    @staticmethod
    def forward(ctx, x):
        return Hoard.keep(x, x * 2.0)

    @staticmethod
    def backward(ctx, grad):
        return Hoard.keep(grad, grad * 2.0)

    @staticmethod
    def keep(*values):
        # An export may call it on tensors without memory, which must not be kept.
        if all(type(value) is torch.Tensor for value in values):
            Hoard.values.extend((value.detach(), value.detach().clone()) for value in values)
        return values[-1]


def test_what_a_member_keeps_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(Hoard, "values", [])
    ort = torch2ort.ORTModule(Model(lambda x, w: Hoard.apply(Hoard.apply(Hoard.apply(x)))))
    for (x,) in batches() * 4:
        ort(x).square().sum().backward()
    assert len(Hoard.values) >= 8 * 12
    for i, (kept, copied) in enumerate(Hoard.values):
        assert_same(kept, copied, f"value {i}", rtol=0, atol=0)


def test_a_second_backward_and_a_forward_without_backward_are_eagers():
    model = Model(lambda x, w: Affine.apply(Square.apply(Square.apply(x)), w))
    ort = torch2ort.ORTModule(copy.deepcopy(model))
    x = torch.randn(3, 4)
    for module in (model, ort):
        module(x)
        loss = module(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same(ort.weight.grad, model.weight.grad, "gradient")


@pytest.mark.filterwarnings("ignore:.*shares memory:torch2ort.Torch2OrtWarning")
def test_a_chain_takes_a_batch_of_nothing():
    model = Model(lambda x, w: Square.apply(Overwrite.apply(Square.apply(x))))
    assert_trains_like_eager(model, [(torch.rand(n, 4),) for n in (3, 0, 2)], steps=3, lr=0.01)


class Negative(torch.autograd.Function):
    """Its output has PyTorch's lazy minus sign, and is kept."""

    @staticmethod
    def forward(ctx, x):
        y = torch.complex(x, 2.0 * x).conj().imag
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return -2.0 * grad


class Flat(torch.autograd.Function):
    """Requires contiguous memory."""

    @staticmethod
    def forward(ctx, x):
        return x.view(-1) * 3.0

    @staticmethod
    def backward(ctx, grad):
        return grad.view(4, -1) * 3.0


class Neighbour(torch.autograd.Function):
    """Its gradient is an argument that it saved, which others read as well."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x * w.detach()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0], None


def shared_with_others(x, w):
    hidden = x * 3.0 + w
    return Neighbour.apply(Overwrite.apply(x), hidden) + hidden * hidden


@pytest.mark.filterwarnings("ignore:.*shares memory:torch2ort.Torch2OrtWarning")
@pytest.mark.parametrize(
    "body",
    [
        lambda x, w: Square.apply(Negative.apply(x)),
        lambda x, w: Flat.apply(Transposed.apply(x).contiguous()),
        shared_with_others,
    ],
    ids=["a lazy minus sign", "a contiguous() between", "a gradient that is another's value"],
)
def test_a_member_sees_values_as_they_are(body):
    assert_trains_like_eager(Model(body), batches(), steps=3, lr=0.01)


class Shared(torch.autograd.Function):
    """Returns a global tensor."""

    value = torch.ones(3, 4)

    @staticmethod
    def forward(ctx, x):
        return Shared.value

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.0


def test_a_tensor_that_a_member_returns_and_keeps_stays_as_it_is():
    ort = torch2ort.ORTModule(Model(lambda x, w: Square.apply(Shared.apply(Square.apply(x)))))
    for _ in range(3):
        ort(torch.rand(3, 4)).sum().backward()
    assert_same(Shared.value, torch.ones(3, 4), "value")
    assert not Shared.value.requires_grad


class WriteLater(torch.autograd.Function):
    """Writes to its argument from its second run on, and did not when it was exported."""

    runs: ClassVar[int] = 0

    @staticmethod
    def forward(ctx, x):
        # An export may call it on tensors without memory.
        WriteLater.runs += type(x) is torch.Tensor
        return x.mul_(2.0) + 0.0 if WriteLater.runs > 1 else x * 2.0

    @staticmethod
    def backward(ctx, grad):
        return grad * 2.0


def test_a_member_that_begins_to_write_to_its_argument_is_refused(monkeypatch):
    monkeypatch.setattr(WriteLater, "runs", 0)
    ort = torch2ort.ORTModule(Model(lambda x, w: WriteLater.apply(Square.apply(x))))
    ort(torch.rand(3, 4))
    message = (
        f"{__name__}.WriteLater: forward wrote to argument 0, but did not when it was exported: write to "
        "a clone(), or mark the argument with ctx.mark_dirty() whenever forward may write to it"
    )
    with pytest.raises(torch2ort.EngineError, match=f"^{re.escape(message)}$"):
        ort(torch.rand(3, 4))


class Extend(torch.autograd.Function):
    """Its output is declared to be its argument's memory."""

    @staticmethod
    def forward(ctx, x):
        return x.view(-1)

    @staticmethod
    def backward(ctx, grad):
        return grad.reshape(-1, 4)


def test_a_call_with_an_in_place_map_stays_apart(tmp_path):
    torch2ort.register_inplace_map(f"{__name__}.Extend", forward={0: 0}, backward={0: 0})
    try:
        model = Model(lambda x, w: Square.apply(Extend.apply(Square.apply(x))))
        assert calls(model, tmp_path) == ["Square", "Extend", "Square"]
        assert_trains_like_eager(model, batches(), steps=4, lr=0.01)
    finally:
        torch2ort.unregister(f"{__name__}.Extend")


def test_chains_come_out_of_the_cache(tmp_path):
    model = Model(lambda x, w: Affine.apply(Square.apply(Square.apply(x)), w))
    x = torch.randn(3, 4)
    model(x).sum().backward()
    for hit in (False, True):
        ort = torch2ort.ORTModule(copy.deepcopy(model), options=torch2ort.Options(cache_dir=tmp_path))
        ort.zero_grad()
        ort(x).sum().backward()
        assert ort.exported.cache.hit is hit
        assert_same(ort.weight.grad, model.weight.grad, "gradient")
