"""Subscribers are called for each module, in eager PyTorch and in the graph of an ORTModule."""

from __future__ import annotations

import copy
import dataclasses
from collections import namedtuple

import pytest
import torch

import torch2ort
from torch2ort.hooks import SubscriberBase, subscribe

Pair = namedtuple("Pair", "a b")
seen: list[tuple[str, int, float]] = []


@dataclasses.dataclass
class Found:
    a: torch.Tensor
    b: int


class See(torch.autograd.Function):
    """Records a number of a tensor in each step, and of its gradient."""

    @staticmethod
    def forward(ctx, x, name, number):
        ctx.name = name
        if type(x) is torch.Tensor:
            seen.append((name, number, round(float(x.sum()), 3)))
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        if type(grad) is torch.Tensor:
            seen.append((f"grad {ctx.name}", 0, round(float(grad.sum()), 3)))
        return grad * 1, None, None


class Watching(SubscriberBase):
    only_watches = True

    def post_forward_tensor_apply_impl(self, run_ctx, module, tensor_index, tensor):
        return See.apply(tensor, run_ctx.name, tensor_index)


class Changing(SubscriberBase):
    """Changes the inputs and outputs of modules, by operators."""

    def pre_forward_module_apply_impl(self, run_ctx, module, args, kwargs):
        return (args[0] + 1,), kwargs

    def pre_forward_tensor_apply_impl(self, run_ctx, module, tensor_index, tensor):
        return tensor * 2

    def post_forward_module_apply_impl(self, run_ctx, module, args, outputs):
        return args, outputs - 3

    def post_forward_tensor_apply_impl(self, run_ctx, module, tensor_index, tensor):
        return tensor * 10


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())


@pytest.fixture(autouse=True)
def nothing_seen():
    seen.clear()


def test_functions_of_a_subscriber_run_in_each_step_of_either():
    x, found = torch.randn(2, 3), []
    for wrapped in (model(), torch2ort.ORTModule(model())):
        with subscribe(wrapped, [Watching()]):
            for _ in range(2):
                seen.clear()
                wrapped(x).sum().backward()
        found.append(list(seen))
    assert [f[:2] for f in found[0]] == [f[:2] for f in found[1]]
    assert [f[2] for f in found[0]] == pytest.approx([f[2] for f in found[1]], abs=2e-3)
    assert [name for name, *_ in found[0]] == ["0", "1", "", "grad ", "grad 1", "grad 0"]


def test_what_a_subscriber_returns_takes_a_tensors_place():
    x = torch.randn(2, 3)
    eager, ort = model(), torch2ort.ORTModule(model())
    with subscribe(eager, [Changing()]), subscribe(ort, [Changing()]):
        torch.testing.assert_close(ort(x), eager(x), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(eager(x), model()(x) * 10)


def test_without_a_subscriber_there_is_no_hook():
    module = model()
    subscribe(module, [Watching()]).remove()
    for one in module.modules():
        assert not one._forward_hooks
        assert not one._forward_pre_hooks


def test_removing_twice_is_once():
    subscription = subscribe(model(), [Watching()])
    subscription.remove()
    subscription.remove()


def test_steps_count_the_calls_of_the_model():
    module = model()
    with subscribe(module, [Watching()]) as subscription:
        assert subscription.step == -1
        for _ in range(3):
            module(torch.randn(2, 3))
        assert subscription.step == 2


def test_a_module_that_is_running_on_onnxruntime_is_watched_from_now_on():
    module, x = torch2ort.ORTModule(model()), torch.randn(2, 3)
    module(x).sum().backward()
    with subscribe(module, [Watching()]):
        module(x).sum().backward()
        assert len(seen) == 6
    seen.clear()
    module(x).sum().backward()
    assert seen == []


def test_depth_says_how_deep():
    module = torch.nn.Sequential(model(), torch.nn.Tanh())
    with subscribe(module, [Watching(depth=0)]):
        module(torch.randn(2, 3))
    assert [name for name, *_ in seen] == [""]


@pytest.mark.parametrize(
    "data",
    [
        [torch.ones(1), 2],
        (torch.ones(1), [torch.ones(1)]),
        Pair(torch.ones(1), None),
        {"a": torch.ones(1)},
        Found(torch.ones(1), 3),
    ],
    ids=["list", "nested", "namedtuple", "dict", "dataclass"],
)
def test_tensors_are_found_in_containers(data):
    class Returning(torch.nn.Module):
        def forward(self):
            return copy.deepcopy(data)

    class Doubling(SubscriberBase):
        def post_forward_tensor_apply_impl(self, run_ctx, module, tensor_index, tensor):
            return tensor * 2

    module = Returning()
    with subscribe(module, [Doubling()]):
        found = module()
    assert type(found) is type(data)
    assert "tensor([2.])" in str(found)
    assert "tensor([1.])" not in str(found)


def test_what_comes_back_as_it_is_stays_that_tensor():
    x = torch.ones(2)
    module = torch.nn.Identity()
    with subscribe(module, [Watching()]):
        assert module(x) is x
    assert seen == [("", 0, 2.0)]


def test_the_end_of_a_call_is_outside_of_the_graph():
    class Ending(SubscriberBase):
        steps: list[int] = []  # noqa: RUF012 - of this class alone

        def post_forward_outmost_module_apply_impl(self, run_ctx, module, args, outputs):
            self.steps.append(run_ctx.step)
            return args, outputs

    module = torch2ort.ORTModule(model())
    with subscribe(module, [Ending()]):
        for _ in range(3):
            module(torch.randn(2, 3))
    assert Ending.steps == [0, 1, 2]


@pytest.mark.parametrize(
    ("subscribers", "given"), [([], "no subscriber"), ([3], "a int among the subscribers")]
)
def test_what_is_no_subscriber_is_refused(subscribers, given):
    message = (
        f"^subscribe: there is {given}; expected a list of objects of subclasses of "
        f"torch2ort.hooks.SubscriberBase.$"
    )
    with pytest.raises(torch2ort.OptionError, match=message):
        subscribe(model(), subscribers)


def test_a_subscriber_outside_of_a_list_is_refused():
    message = (
        "^subscribe: the subscribers are a SubscriberBase; expected a list of objects of subclasses of "
        "torch2ort.hooks.SubscriberBase.$"
    )
    with pytest.raises(torch2ort.OptionError, match=message):
        subscribe(model(), SubscriberBase())


@pytest.mark.parametrize("field", ["start_step", "end_step", "depth"])
def test_numbers_are_checked(field):
    message = f"^SubscriberBase: {field} is -1; allowed is an integer of at least 0, or None.$"
    with pytest.raises(torch2ort.OptionError, match=message):
        SubscriberBase(**{field: -1})


def test_an_empty_range_of_steps_is_refused():
    message = (
        "^SubscriberBase: end_step is 3, and the first step is 3; end_step is the number of the step after "
        "the last one.$"
    )
    with pytest.raises(torch2ort.OptionError, match=message):
        SubscriberBase(start_step=3, end_step=3)
