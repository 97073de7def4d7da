"""Training by a joint trace, on an onnxruntime without differentiation, with eager PyTorch's gradients."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

import torch2ort
from tests.support.comparison import assert_same, assert_trains_like_eager
from tests.support.functions import Constants, Numpy, Square, TwoOutputs
from torch2ort import Options
from torch2ort.errors import EngineError, UnsupportedOperatorError


class Then(torch.nn.Module):
    """A layer, and a function of its result."""

    def __init__(self, function) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.function = function

    def forward(self, x, *more):
        return self.function(self.layer(x), *more)


class Several(torch.autograd.Function):
    """An index, a result without gradient, and no gradient for its first argument."""

    @staticmethod
    def forward(ctx, x, y):
        index, other = x.argmax(-1), y.detach() * 2
        ctx.mark_non_differentiable(index, other)
        ctx.save_for_backward(x)
        return x * y, index, other

    @staticmethod
    def backward(ctx, grad, index, other):
        return None, grad * ctx.saved_tensors[0]


class Dirty(torch.autograd.Function):
    """Writes to its argument."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Counting(torch.autograd.Function):
    """Counts its calls, records needs_input_grad and keeps an attribute."""

    forwards = 0
    needed: tuple[bool, ...] = ()

    @staticmethod
    def forward(ctx, x, weight):
        if type(x) is torch.Tensor:
            Counting.forwards += 1
        ctx.scale = 3.0
        ctx.save_for_backward(x, weight)
        return x * weight * ctx.scale

    @staticmethod
    def backward(ctx, grad):
        Counting.needed = ctx.needs_input_grad
        x, weight = ctx.saved_tensors
        return grad * weight * ctx.scale, (grad * x).sum(0) * ctx.scale


class Unmaterialized(torch.autograd.Function):
    """Gets a missing gradient as None."""

    seen: tuple[bool, ...] = ()

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        Unmaterialized.seen = (first is None, second is None)
        return (0 if first is None else first * 2) + (0 if second is None else second * 3)


class Noisy(torch.autograd.Function):
    """Draws random numbers forward and backward."""

    @staticmethod
    def forward(ctx, x):
        noise = torch.rand_like(x)
        ctx.save_for_backward(noise)
        return x * noise

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0] + torch.rand_like(grad)


class ConvNet(torch.nn.Module):
    """Convolution, normalisation with running statistics, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 4, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(4)
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.head(F.max_pool2d(self.norm(self.convolution(x)).relu(), 2).mean((2, 3)))


class Tied(torch.nn.Module):
    """A weight that is used twice, with rows that get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 4, padding_idx=0)
        self.out = torch.nn.Linear(4, 10, bias=False)
        self.out.weight = self.table.weight

    def forward(self, index):
        return self.out(Square.apply(self.table(index)))


class Counter(torch.nn.Module):
    """Writes to a buffer on which its result depends."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        y = self.layer(x)
        before = y * self.mean.clone()
        self.mean.add_(y.detach().mean(0))
        return before + y * (1 + self.mean)


def quiet_region(h):
    with torch.no_grad():
        scale = Square.apply(h).mean()
    return h * scale


def batch(*shape: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(*shape, requires_grad=True),)


PROGRAMS = {
    "saved input": lambda h: Square.apply(h).tanh(),
    "constants": lambda h: Constants.apply(h, *Constants.EXPECTED),
    "numpy": Numpy.apply,
    "two outputs": lambda h: TwoOutputs.apply(h),
    "one of two outputs": lambda h: TwoOutputs.apply(h)[1],
    "no gradient for an argument": lambda h: Several.apply(h.tanh(), h)[0] + Several.apply(h, h)[2],
    "results without gradient": lambda h: Several.apply(h, h),
    "written argument": lambda h: Dirty.apply(h.clone()) + 1,
    "missing gradient": lambda h: Unmaterialized.apply(h)[1],
    "views and writes": lambda h: h.clone().view(2, 2, 2).transpose(1, 2).contiguous()[:, 0].mul_(2).sin_(),
    "output that is a view": lambda h: (h, h.view(8)),
    "one output twice": lambda h: (h, h),
    "detach": lambda h: Square.apply(h) * h.detach(),
    "no_grad": quiet_region,
    "sum of one value": lambda h: h + h,
    "softmax and log": lambda h: F.log_softmax(h, 1) + F.softmax(h, 0),
    "layer_norm and gelu": lambda h: F.gelu(F.layer_norm(h, (4,))),
    "scatter": lambda h: torch.zeros(3, 4).index_put((torch.tensor([0, 0]),), h, accumulate=True),
    "ties": lambda h: h.sign().max(1).values + h.sign().topk(2).values.sum(1) + h.sign().sort().values[:, 0],
    "attention": lambda h: F.scaled_dot_product_attention(h[None], h[None] * 2, h[None], is_causal=True),
    "constant of its own": lambda h: h * torch.arange(4.0) + Square.apply(torch.ones(4)),
}


@pytest.mark.filterwarnings("ignore:.*Dirty.*register_inplace_map:torch2ort.Torch2OrtWarning")
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_gradients_are_eagers(program) -> None:
    assert_trains_like_eager(Then(program), [batch(2, 4), batch(2, 4)], steps=2)


def written_draw(h):
    """Write to an otherwise unused product of a random tensor."""
    (h * torch.rand(2, 4)).data.mul_(0.5)
    return h * torch.rand(2, 4)


RANDOM = {
    "dropout": lambda h: F.dropout(h, 0.5) + F.dropout(h.t(), 0.3).t(),
    "unread, written to": written_draw,
    "rand_like": lambda h: h * torch.rand_like(h) + torch.rand_like(h.t().contiguous()).t(),
    "rand": lambda h: h * torch.rand(2, 4) + torch.randn(4),
    "bernoulli": lambda h: h * torch.bernoulli(torch.full((2, 4), 0.5)),
    "written": lambda h: h * torch.empty(2, 4).normal_() + torch.zeros(4).uniform_(),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "gumbel_softmax": lambda h: F.gumbel_softmax(h),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.4, training=True),
    "feature dropout": lambda h: F.dropout1d(h, 0.5),
    "function": lambda h: Noisy.apply(Noisy.apply(h)) + Noisy.apply(h.tanh()),
    "attention with dropout": lambda h: F.scaled_dot_product_attention(*[h[None]] * 3, dropout_p=0.5),
    "between": lambda h: F.dropout(Noisy.apply(F.dropout(h)) * torch.rand_like(h)),
}


@pytest.mark.parametrize("program", RANDOM.values(), ids=RANDOM)
def test_random_numbers_are_eagers(program) -> None:
    assert_trains_like_eager(Then(program), [batch(2, 4)], steps=3)


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (ConvNet, (torch.randn(4, 3, 6, 6),)),
        (Tied, (torch.tensor([[1, 0, 3]]),)),
        (Counter, (torch.randn(3, 4),)),
    ],
    ids=["ConvNet", "Tied", "Counter"],
)
def test_models_train_like_eager(model, given) -> None:
    assert_trains_like_eager(model().train(), [given], steps=3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_train_like_eager(dtype) -> None:
    x = torch.randn(2, 4, dtype=dtype, requires_grad=True)
    assert_trains_like_eager(Then(lambda h: Square.apply(h).tanh()).to(dtype), [(x,)], steps=2)


def test_frozen_weights_get_no_gradient() -> None:
    model = Then(Square.apply)
    model.layer.bias.requires_grad_(False)
    assert_trains_like_eager(model, [(torch.randn(2, 4),)], steps=2)


def test_each_size_has_its_graph() -> None:
    assert_trains_like_eager(Then(Square.apply), [batch(n, 4) for n in (2, 5, 1, 2)], steps=4)


class Weighted(torch.nn.Module):
    """A weight that a Function multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4))

    def forward(self, x):
        return Counting.apply(x, self.weight).tanh()


@pytest.fixture
def pair():
    """A model and its wrapper, whose Function multiplies by a weight."""
    model = Weighted()
    return model, torch2ort.ORTModule(copy.deepcopy(model))


def test_a_retained_graph_does_not_run_forward_again(pair) -> None:
    _, module = pair
    x = torch.randn(2, 4, requires_grad=True)
    module(x).sum().backward()
    gradients = []
    for run in pair:
        x.grad = None
        run.zero_grad()
        loss = run(x).sum()
        before = Counting.forwards
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        assert Counting.forwards == before
        gradients.append((x.grad, run.weight.grad))
    assert_same(gradients[1], gradients[0], "gradients of three backwards")


def test_a_second_backward_without_retain_graph_is_eagers_error(pair) -> None:
    _, module = pair
    loss = module(torch.randn(2, 4)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match=r"^Trying to backward through the graph a second time"):
        loss.backward()


def test_several_forwards_go_before_a_backward(pair) -> None:
    given = [torch.randn(2, 4) for _ in range(3)]
    gradients = []
    for run in pair:
        losses = [run(x).sum() for x in given]
        losses[1].backward()
        losses[0].backward()
        losses[2].backward()
        gradients.append(run.weight.grad)
    assert_same(gradients[1], gradients[0], "gradient of the weight")


def test_a_function_is_told_which_gradients_are_needed(pair) -> None:
    _, module = pair
    module(torch.randn(2, 4)).sum().backward()
    assert Counting.needed == (False, True)
    module(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert Counting.needed == (True, True)


class Held(torch.autograd.Function):
    """Keeps a weak reference to an attribute of its context."""

    contexts: ClassVar[list[weakref.ref]] = []

    @staticmethod
    def forward(ctx, x):
        ctx.token = type("Token", (), {})()
        if type(x) is torch.Tensor:
            Held.contexts.append(weakref.ref(ctx.token))
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * 1


def test_a_forward_without_a_backward_frees_its_state() -> None:
    module = torch2ort.ORTModule(Then(Held.apply))
    module(torch.randn(2, 4)).sum().backward()
    Held.contexts.clear()
    result = module(torch.randn(2, 4))
    assert Held.contexts[0]() is not None
    del result
    gc.collect()
    assert Held.contexts[0]() is None


def test_a_gradient_that_nobody_asks_for_is_not_computed() -> None:
    """One of two outputs has an infinite derivative, which eager PyTorch does not multiply by zero."""
    gradients = []
    model = Then(lambda h: (h.sum(), (h * 0).sqrt(), Square.apply(h)))
    for run in (model, torch2ort.ORTModule(copy.deepcopy(model))):
        x = torch.ones(2, 4, requires_grad=True)
        run(x)[0].backward()
        gradients.append([x.grad, *(p.grad for p in run.parameters())])
    assert bool(gradients[0][0].isfinite().all())
    assert_same(gradients[1], gradients[0], "gradients of one output")


def test_weights_of_an_output_without_gradient_get_none() -> None:
    class Heads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

        def forward(self, x):
            return self.first(Square.apply(x)), Several.apply(self.second(x), x)[0]

    module = torch2ort.ORTModule(Heads())
    module(torch.randn(2, 4))[0].sum().backward()
    assert [p.grad is None for p in module.parameters()] == [False, False, True, True]
    module.zero_grad()
    x = torch.randn(2, 4, requires_grad=True)
    module(x)[1].sum().backward()
    # Its Function returns no gradient to the head.
    assert [p.grad is None for p in module.parameters()] == [True] * 4
    assert x.grad is not None


def test_a_double_backward_is_refused(pair) -> None:
    _, module = pair
    loss = module(torch.randn(2, 4)).sum()
    with pytest.raises(EngineError, match=r"^ORTModule: a backward with create_graph=True"):
        torch.autograd.grad(loss, list(module.parameters()), create_graph=True)


def test_a_weight_that_is_written_to_before_backward_is_eagers_error(pair) -> None:
    for run in pair:
        loss = run(torch.randn(2, 4)).sum()
        with torch.no_grad():
            run.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_an_output_that_backward_reads_and_is_written_to_is_eagers_error() -> None:
    model = Then(torch.tanh)
    for run in (model, torch2ort.ORTModule(model)):
        result = run(torch.randn(2, 4))
        loss = result.sum()
        with torch.no_grad():
            result.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class Picky(torch.autograd.Function):
    """Raises an exception object of its own in backward."""

    error = ValueError("mine")

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        raise Picky.error


def test_an_exception_of_backward_arrives_as_it_is() -> None:
    module = torch2ort.ORTModule(Then(Picky.apply))
    loss = module(torch.randn(2, 4)).sum()
    with pytest.raises(ValueError, match=r"^mine$") as caught:
        loss.backward()
    assert caught.value is Picky.error


def test_verify_compares_gradients_too() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            # Only autograd's own contexts have this attribute.
            return grad * (2 if hasattr(ctx, "next_functions") else 3)

    module = torch2ort.ORTModule(Then(Wrong.apply), options=Options(verify=True))
    loss = module(torch.randn(2, 4)).sum()
    with pytest.raises(EngineError, match=r"^verify: gradient of 'layer\.weight' differs from eager"):
        loss.backward()


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda h: h.t() + torch.rand_like(h.t()), "aten.rand_like.default"),
        (lambda h: Noisy.apply(h.t()), "torch2ort.python_op.default"),
    ],
    ids=["operator", "function"],
)
def test_random_numbers_in_another_order_of_memory_are_refused(draw, name) -> None:
    message = re.escape(f"{name} at ") + (
        r".* draws random numbers for a tensor whose dimensions lie in another order in memory, with strides "
        r"\(1, 4\), and a graph would give them to other elements than eager\. Draw them for a contiguous "
        r"tensor, as in torch\.rand_like\(x\.contiguous\(\)\)"
    )
    with pytest.raises(UnsupportedOperatorError, match=f"^{message}$"):
        torch2ort.ORTModule(Then(draw))(torch.randn(2, 4))


def test_a_sparse_gradient_is_refused() -> None:
    module = torch2ort.ORTModule(torch.nn.Embedding(5, 4, sparse=True))
    message = re.escape(
        "has sparse=True, but the gradients of a graph are dense. Make the table with sparse="
    )
    with pytest.raises(UnsupportedOperatorError, match=message):
        module(torch.tensor([1, 2]))
