"""Everything that an autograd Function may do gives eager PyTorch's results on ONNX Runtime."""

from __future__ import annotations

import copy
import warnings
from typing import ClassVar

import pytest
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import torch2ort
from tests.support.comparison import assert_same, assert_trains_like_eager

pytestmark = pytest.mark.filterwarnings("ignore::torch2ort.errors.Torch2OrtWarning")


class Around(torch.nn.Module):
    """``call`` between a linear layer and a second tensor that also needs a gradient."""

    def __init__(self, call) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self._call = call

    def forward(self, x):
        return self._call(self.first(x), self.second(x), x)


def check(call, shape=(5, 4), steps=3):
    return assert_trains_like_eager(
        Around(call), [(torch.randn(shape, requires_grad=True),)], lr=0.01, steps=steps
    )


class Scale(Function):
    """Its only constant may be anything with a value."""

    @staticmethod
    def forward(ctx, x, constant):
        ctx.constant = constant
        return x * Scale.value(constant)

    @staticmethod
    def backward(ctx, grad):
        return grad * Scale.value(ctx.constant) * 2, None

    @staticmethod
    def value(constant):
        if isinstance(constant, (tuple, list)):
            return float(sum(constant)) + len(constant)
        if isinstance(constant, dict):
            return float(sum(constant.values()))
        return float(getattr(constant, "factor", 0) or len(repr(constant)))


class Thing:
    factor = 1.5


@pytest.mark.parametrize(
    "constant",
    [
        *(True, False, 3, -(2**70), 0.1, float("inf"), "text", None, (1, 2), (0.1, 0.2), (True, False), ()),
        *(
            [1, 2.5],
            {"a": 1, "b": 0.25},
            pytest.param(Thing(), id="Thing()"),
            Thing,
            torch.float32,
            torch.device("cpu"),
            slice(1, 2),
            ...,
        ),
    ],
    ids=repr,
)
def test_constants(constant):
    check(lambda h, k, x: torch.tanh(Scale.apply(h, constant)) + k)


class Interleaved(Function):
    """Tensors between constants."""

    @staticmethod
    def forward(ctx, a, x, b, y, c):
        assert (a, b, c) == (2, "b", 0.1)
        ctx.save_for_backward(x, y)
        return x * a + y * c

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return None, grad * 2 * x, None, grad * y, None


def test_tensors_between_constants():
    check(lambda h, k, x: Interleaved.apply(2, h, "b", k, 0.1))


class Dirty(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_mark_dirty_is_seen_by_what_comes_after_and_not_before():
    def call(h, k, x):
        before = h * 3
        after = Dirty.apply(h)
        return before + torch.tanh(after) + h + k

    check(call)


class Silent(Function):
    """Writes into an argument without mark_dirty, as quantisers' observers do."""

    @staticmethod
    def forward(ctx, x, counter):
        counter.add_(1)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


def test_a_buffer_written_inside_forward_is_updated():
    class Observer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            return Silent.apply(self.layer(x), self.count)

    module = assert_trains_like_eager(Observer(), [(torch.randn(3, 4),)], steps=4, lr=0.01)
    assert module.count.item() == 4


class Mixed(Function):
    """Returns two tensors and a constant, int64 and bool among them."""

    @staticmethod
    def forward(ctx, x):
        values, index = x.max(-1)
        mask = x > 0
        ctx.mark_non_differentiable(index, mask)
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return values, "note", index, mask, None

    @staticmethod
    def backward(ctx, grad, *rest):
        (index,) = ctx.saved_tensors
        return torch.zeros(ctx.shape).scatter_(-1, index.unsqueeze(-1), grad.unsqueeze(-1))


def test_outputs_of_every_kind():
    def call(h, k, x):
        values, note, index, mask, nothing = Mixed.apply(h)
        assert note == "note"
        assert nothing is None
        return torch.where(mask, k, -k) + values.unsqueeze(-1) + index.to(torch.float32).unsqueeze(-1)

    check(call)


class MaskedBy(Function):
    @staticmethod
    def forward(ctx, x, mask, index):
        assert mask.dtype is torch.bool
        assert index.dtype is torch.int64
        ctx.save_for_backward(mask)
        return torch.where(mask, x, -x)

    @staticmethod
    def backward(ctx, grad):
        (mask,) = ctx.saved_tensors
        return torch.where(mask, grad, -grad), None, None


def test_bool_and_int_inputs():
    check(lambda h, k, x: MaskedBy.apply(h, k > 0, x.argmax(-1)) + k)


class Half(Function):
    """One of its float outputs is not differentiable."""

    @staticmethod
    def forward(ctx, x):
        low = x * 0.5
        ctx.mark_non_differentiable(low)
        return x * 2, low

    @staticmethod
    def backward(ctx, grad, low):
        return grad * 2


def test_a_float_output_that_is_not_differentiable():
    def call(h, k, x):
        high, low = Half.apply(h)
        return high + torch.tanh(low) * k

    check(call)


class Seen(Function):
    """Records the gradients that backward gets."""

    materialize = True
    got: ClassVar[list] = []

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(Seen.materialize)
        return x * 2, x.sum(-1)

    @staticmethod
    def backward(ctx, a, b):
        Seen.got.append([None if g is None else tuple(g.shape) for g in (a, b)])
        zero = 0 if a is None else a * 2
        return zero + (0 if b is None else b.unsqueeze(-1).expand(-1, 4))


@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("used", [0, 1])
def test_unused_outputs_in_runs_of_several_sizes(materialize, used, monkeypatch):
    monkeypatch.setattr(Seen, "materialize", materialize)
    model = Around(lambda h, k, x: Seen.apply(h)[used])
    ort = torch2ort.ORTModule(copy.deepcopy(model))
    for rows in (5, 3, 7):
        x = torch.randn(rows, 4)
        got = []
        for module in (model, ort):
            monkeypatch.setattr(Seen, "got", [])
            module(x).sum().backward()
            got.append(Seen.got)
        assert got[1] == got[0]
        for (name, e), (_, a) in zip(model.named_parameters(), ort.named_parameters(), strict=True):
            assert_same(a.grad, e.grad, name)


class NoneFor(Function):
    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def test_a_none_gradient_stays_none():
    module = check(lambda h, k, x: NoneFor.apply(h * 2, k))
    assert module.second.weight.grad is None


def test_a_none_gradient_beside_a_real_one():
    check(lambda h, k, x: NoneFor.apply(h, k) + k * 3)


class Needs(Function):
    seen: ClassVar[list] = []

    @staticmethod
    def forward(ctx, x, constant, y):
        Needs.seen.append((ctx.needs_input_grad, x.requires_grad, y.requires_grad))
        ctx.save_for_backward(y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        Needs.seen.append(ctx.needs_input_grad)
        (y,) = ctx.saved_tensors
        return grad * y, None, None


def test_needs_input_grad(monkeypatch):
    model = Around(lambda h, k, x: Needs.apply(h, 1, x))
    ort = torch2ort.ORTModule(copy.deepcopy(model))
    x = torch.randn(2, 4)
    ort(x)
    seen = []
    for module in (model, ort):
        monkeypatch.setattr(Needs, "seen", [])
        module(x).sum().backward()
        seen.append(Needs.seen)
    assert seen[1] == seen[0] == [((True, False, False), True, False), (True, False, False)]


class WithSetup(Function):
    @staticmethod
    def forward(x, factor=3.0):
        return x * factor, x + 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, factor = inputs
        ctx.factor = factor
        ctx.save_for_backward(x, output[0])

    @staticmethod
    def backward(ctx, a, b):
        x, output = ctx.saved_tensors
        return a * ctx.factor + b * x + output * 0.1, None


@pytest.mark.parametrize("arguments", [(), (2.0,)])
def test_setup_context(arguments):
    check(lambda h, k, x: sum(WithSetup.apply(h, *arguments)) + k)


class SavesAll(Function):
    """Inputs, outputs, intermediates, None, and a view on ctx."""

    @staticmethod
    def forward(ctx, x, y):
        middle = x * y
        output = middle.exp()
        ctx.save_for_backward(x, None, middle, output, y)
        ctx.view = x.view(-1)[2:]
        return output

    @staticmethod
    def backward(ctx, grad):
        x, nothing, middle, output, y = ctx.saved_tensors
        assert nothing is None
        extra = torch.zeros_like(x).view(-1)
        extra[2:] = ctx.view
        return grad * output * y + extra.view_as(x) * 0.01, grad * middle * x


@pytest.mark.parametrize(
    "around",
    [
        lambda h, k: SavesAll.apply(h, k),
        lambda h, k: torch.relu(h) + SavesAll.apply(h, k) + torch.sigmoid(k),
        lambda h, k: torch.tanh(torch.relu(SavesAll.apply(h, k))),
        lambda h, k: SavesAll.apply(h, k) + torch.exp(h) - torch.neg(k),
    ],
)
def test_what_is_saved_is_not_written_over(around):
    check(lambda h, k, x: around(torch.tanh(h), torch.tanh(k)))


class Alternating(Function):
    """Saves a different tensor in every call."""

    step = 0

    @staticmethod
    def forward(ctx, x, y):
        Alternating.step += 1
        ctx.first = Alternating.step % 2 == 0
        ctx.save_for_backward(x if ctx.first else y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        (kept,) = ctx.saved_tensors
        return (grad * kept, None) if ctx.first else (None, grad * kept)


def test_different_tensors_saved_at_different_steps(monkeypatch):
    model = Around(lambda h, k, x: torch.relu(h) + Alternating.apply(h, k) + torch.relu(k))
    ort = torch2ort.ORTModule(copy.deepcopy(model))
    ort(torch.randn(5, 4))
    for start in (0, 1, 0, 1):
        x = torch.randn(5, 4)
        for module in (model, ort):
            monkeypatch.setattr(Alternating, "step", start)
            module.zero_grad()
            module(x).square().mean().backward()
        for (name, e), (_, a) in zip(model.named_parameters(), ort.named_parameters(), strict=True):
            assert_same(a.grad, e.grad, name)


history: list[torch.Tensor] = []


class Remembers(Function):
    """Keeps its inputs and outputs in a global."""

    @staticmethod
    def forward(ctx, x):
        y = x * 2
        if type(x) is torch.Tensor:
            history.extend([x, y])
        return y

    @staticmethod
    def backward(ctx, grad):
        history.append(grad)
        return grad * 2


def test_what_a_global_keeps_stays_as_it_was():
    model = Around(lambda h, k, x: torch.relu(Remembers.apply(h)) + torch.relu(h))
    ort = torch2ort.ORTModule(copy.deepcopy(model))
    ort(torch.randn(5, 4)).sum().backward()
    kept = []
    x = torch.randn(5, 4)
    for module in (model, ort):
        history.clear()
        for _ in range(3):
            module(x).square().mean().backward()
        junk = [torch.randn(5, 4) for _ in range(50)]
        kept.append(list(history))
        del junk
    history.clear()
    for a, e in zip(kept[1], kept[0], strict=True):
        assert_same(a, e, "kept")


class Identity(Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class View(Function):
    @staticmethod
    def forward(ctx, x):
        return x[1:]

    @staticmethod
    def backward(ctx, grad):
        return torch.cat([torch.zeros_like(grad[:1]), grad])


class Detached(Function):
    @staticmethod
    def forward(ctx, x, weight):
        return weight.detach()

    @staticmethod
    def backward(ctx, grad):
        return None, grad * 3


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda h, k, x: torch.relu(Identity.apply(h)) + torch.relu(h) + k, id="the input"),
        pytest.param(lambda h, k, x: torch.relu(View.apply(h)) + torch.relu(h)[1:], id="a view of the input"),
        pytest.param(lambda h, k, x: torch.relu(Detached.apply(h, k)) + k, id="a parameter's detach"),
        pytest.param(lambda h, k, x: Identity.apply(x) * h, id="the model's input"),
    ],
)
def test_outputs_that_share_memory(call):
    check(call)


def test_undeclared_aliasing_warns_once_and_names_the_map():
    ort = torch2ort.ORTModule(Around(lambda h, k, x: torch.relu(Identity.apply(h)) + k))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            ort(torch.randn(2, 4)).sum().backward()
    texts = [str(w.message) for w in caught if issubclass(w.category, torch2ort.Torch2OrtWarning)]
    name = f"{Identity.__module__}.Identity"
    assert sorted(texts) == sorted(
        [
            f"{name}: output 0 shares memory with argument 0, which was made correct by a copy. "
            f"To save the copy, declare torch2ort.register_inplace_map('{name}', forward={{0: 0}})",
            f"{name}: the gradient of argument 0 shares memory with the gradient of output 0, which was made "
            f"correct by a copy. To save the copy, declare "
            f"torch2ort.register_inplace_map('{name}', backward={{0: 0}})",
        ]
    )


class Transposed(Function):
    @staticmethod
    def forward(ctx, x):
        return (x * 2).t()

    @staticmethod
    def backward(ctx, grad):
        return grad.t() * 2


def test_outputs_and_gradients_that_are_not_contiguous():
    check(lambda h, k, x: Transposed.apply(h) @ k, shape=(4, 4))


def test_empty_tensors():
    check(lambda h, k, x: torch.cat([Scale.apply(h[:0], 2.0), h]) + k, steps=2)


def test_the_same_function_many_times_on_one_input():
    check(lambda h, k, x: sum(Scale.apply(h, float(i)) for i in range(1, 6)) + k)


class Once(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def test_once_differentiable():
    check(lambda h, k, x: Once.apply(h) + k)


class CallsAnother(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return Once.apply(x) + 1

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (inner,) = torch.autograd.grad(Once.apply(x).sum(), x)
        return grad * inner


def test_a_function_that_calls_another_inside():
    module = check(lambda h, k, x: CallsAnother.apply(h) + k)
    assert [site.function for site in module.exported.python_ops] == [CallsAnother]


class Force(Function):
    """The force of an energy, by autograd in forward; backward derives it once more."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            place = x.detach().requires_grad_()
            (force,) = torch.autograd.grad((place**3).sum(), place, create_graph=True)
        ctx.place, ctx.force = place, force
        return force.detach()

    @staticmethod
    def backward(ctx, grad):
        return torch.autograd.grad(ctx.force, ctx.place, grad)[0]


def test_a_function_whose_forward_calls_autograd():
    check(lambda h, k, x: Force.apply(h) + k)


class KeepsByAGraph(Function):
    """Holds its argument only by the autograd graph of an operator inside."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            ctx.node = x.detach().requires_grad_().square().sum().grad_fn
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.node.next_functions[0][0]._saved_self


def test_an_argument_that_only_an_inner_graph_keeps_lives_until_backward():
    check(lambda h, k, x: KeepsByAGraph.apply(h * 2) + torch.relu(h * 3) + k)


class Noise(Function):
    @staticmethod
    def forward(ctx, x):
        noise = torch.rand_like(x)
        ctx.save_for_backward(noise)
        return x * noise

    @staticmethod
    def backward(ctx, grad):
        (noise,) = ctx.saved_tensors
        return grad * noise


def test_random_numbers_of_functions_and_dropout_come_in_eagers_order():
    def call(h, k, x):
        dropped = torch.nn.functional.dropout(k, 0.5)
        noisy = Noise.apply(h)
        return noisy + torch.nn.functional.dropout(noisy, 0.3) + dropped + Noise.apply(dropped)

    check(call)


class Vjp(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def vjp(ctx, grad):
        return grad * 3


def test_vjp_in_place_of_backward():
    check(lambda h, k, x: Vjp.apply(h) + k)


# --- gradients of a wrong number or shape ---


def failing(backward):
    class Bad(Function):
        @staticmethod
        def forward(ctx, x, y):
            return x + y

        @staticmethod
        def backward(ctx, grad):
            return backward(grad)

    return Bad


@pytest.mark.parametrize(
    "backward",
    [
        pytest.param(lambda g: g * 1, id="too few"),
        pytest.param(lambda g: (g * 1, g * 1, g * 1), id="too many"),
        pytest.param(lambda g: (g[:1, :2] * 1, g * 1), id="wrong shape"),
        pytest.param(lambda g: (1.0, g * 1), id="not a tensor"),
    ],
)
def test_gradients_that_do_not_fit_raise_as_in_eager(backward):
    bad = failing(backward)
    model = Around(lambda h, k, x: bad.apply(h, k))
    errors = []
    for module in (model, torch2ort.ORTModule(copy.deepcopy(model))):
        with pytest.raises((RuntimeError, TypeError)) as caught:
            module(torch.randn(2, 4)).sum().backward()
        errors.append((type(caught.value), str(caught.value)))
    assert errors[1] == errors[0]


@pytest.mark.parametrize(
    "backward",
    [
        pytest.param(lambda g: (g.double(), g * 1), id="another dtype"),
        pytest.param(lambda g: (g.expand(3, *g.shape) * 1, g * 1), id="expandable"),
        pytest.param(lambda g: (g * 1, g * 1, None), id="trailing None"),
    ],
)
def test_gradients_that_eager_fits_in_are_fitted_in(backward):
    bad = failing(backward)
    check(lambda h, k, x: bad.apply(h, k), steps=1)


class Boxed(Function):
    """Requests its gradients as a list, which torch supports from 2.14 on."""

    boxed_grads_call = True

    @staticmethod
    def forward(ctx, x):
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, *given):
        if isinstance(given[0], list):
            (gradients,) = given
            return gradients.pop() * 7 + gradients.pop() * 5
        return given[0] + given[1]


def test_gradients_in_one_list():
    check(lambda a, b, x: torch.mul(*Boxed.apply(a)) + b)
