"""ORTModule: the interface of the wrapped module, exported again when necessary."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import traceback
import weakref

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_same, assert_trains_like_eager, tensors_of
from tests.support.functions import Square, TwoOutputs
from tests.test_exported_model import Stateful, assert_goes_on_like


class Model(torch.nn.Module):
    """A Function between two layers, with a switch, a nested output and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 5)
        self.last = torch.nn.Linear(5, 2)
        self.register_buffer("offset", torch.ones(5))

    def forward(self, x, double: bool = False, *, shift: float = 0.0):
        """Return the output and the hidden value."""
        hidden = Square.apply(self.first(x) + self.offset)
        if double:
            hidden = hidden * 2
        return {"y": self.last(hidden) + shift, "hidden": hidden}

    def own_method(self):
        return self.first.out_features


@pytest.fixture
def pair():
    model = Model()
    return model, torch2ort.ORTModule(copy.deepcopy(model))


def gradients(module, output):
    module.zero_grad()
    sum(t.square().sum() for t in tensors_of(output)).backward()
    return {name: p.grad for name, p in module.named_parameters()}


def assert_like(eager, ort, *args, **kwargs):
    expected, actual = eager(*args, **kwargs), ort(*args, **kwargs)
    for a, e in zip(tensors_of(actual), tensors_of(expected), strict=True):
        assert_same(a, e, "output")
    if expected["y"].requires_grad:
        wanted, given = gradients(eager, expected), gradients(ort, actual)
        for name in wanted:
            assert_same(given[name], wanted[name], name)


# --- the surface ---


def test_it_shares_everything_with_the_model():
    model = Model()
    ort = torch2ort.ORTModule(model)
    assert isinstance(ort, Model)
    assert isinstance(ort, torch2ort.ORTModule)
    assert [id(p) for p in ort.parameters()] == [id(p) for p in model.parameters()]
    assert list(ort.state_dict()) == list(model.state_dict())
    assert dict(ort.named_modules()).keys() == dict(model.named_modules()).keys()
    assert inspect.signature(ort.forward) == inspect.signature(model.forward)
    assert ort.own_method() == 5
    ort.eval()
    assert not model.training
    ort.note = "set on one"
    assert model.note == "set on one"
    ort.load_state_dict(Model().state_dict())


def test_exported_is_none_before_the_first_forward(pair):
    _, ort = pair
    assert ort.exported is None
    ort(torch.randn(2, 4))
    assert isinstance(ort.exported, torch2ort.ExportedModel)
    assert [site.function for site in ort.exported.python_ops] == [Square]


def test_the_exported_model_follows_the_weights(pair):
    _, ort = pair
    x = torch.randn(2, 4)
    ort(x)
    with torch.no_grad():
        ort.last.bias.add_(1)
    assert_same(ort.exported(x)["y"], ort(x)["y"].detach(), "output")


def test_hooks_run_once(pair):
    _, ort = pair
    seen = []
    ort.register_forward_pre_hook(lambda module, args: seen.append("pre"))
    ort.register_forward_hook(lambda module, args, output: seen.append("post"))
    ort(torch.randn(2, 4))
    seen.clear()
    ort(torch.randn(2, 4))
    assert seen == ["pre", "post"]


@pytest.mark.parametrize("after_a_run", [False, True])
def test_deepcopy_and_pickle(pair, after_a_run):
    eager, ort = pair
    x = torch.randn(2, 4)
    if after_a_run:
        ort(x)["y"].sum().backward()
        ort.zero_grad()
    for copied in (copy.deepcopy(ort), pickle.loads(pickle.dumps(ort))):
        assert isinstance(copied, torch2ort.ORTModule)
        assert copied.first.weight is not ort.first.weight
        assert_like(eager, copied, x)


def test_wrapping_twice_is_refused(pair):
    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.ORTModule(pair[1])
    assert str(caught.value) == "ORTModule: the model is already an ORTModule; wrap the original model once"


def test_wrapping_something_else_is_refused():
    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.ORTModule(len)
    assert str(caught.value) == "ORTModule: expected a torch.nn.Module, got builtin_function_or_method"


# --- exporting again ---


def test_a_toggled_argument_gets_a_graph_of_its_own(pair):
    eager, ort = pair
    x = torch.randn(2, 4)
    first = {}
    for double, shift in ((False, 0.0), (True, 0.0), (False, 1.5)):
        assert_like(eager, ort, x, double, shift=shift)
        first[double, shift] = ort.exported
    for key, exported in first.items():
        ort(x, key[0], shift=key[1])
        assert ort.exported is exported
    assert len(set(map(id, first.values()))) == 3


def test_positional_and_keyword_calls_share_a_graph(pair):
    eager, ort = pair
    x = torch.randn(2, 4)
    assert_like(eager, ort, x)
    first = ort.exported
    assert_like(eager, ort, x=x, double=False)
    assert ort.exported is first


def test_train_and_eval_have_graphs_of_their_own():
    eager = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    ort = torch2ort.ORTModule(copy.deepcopy(eager))
    x = torch.randn(8, 4)
    for training in (True, False, True):
        eager.train(training)
        ort.train(training)
        torch.manual_seed(3)
        expected = eager(x)
        torch.manual_seed(3)
        assert_same(ort(x), expected, f"training={training}")


def test_changed_requires_grad(pair):
    eager, ort = pair
    x = torch.randn(2, 4)
    assert_like(eager, ort, x)
    for module in (eager, ort):
        module.first.weight.requires_grad_(False)
    assert_like(eager, ort, x)
    assert ort.first.weight.grad is None


def test_gradients_of_inputs(pair):
    eager, ort = pair
    x = torch.randn(2, 4)
    given = [x.clone().requires_grad_() for _ in range(2)]
    for module, t in zip((eager, ort), given, strict=True):
        module(t)["y"].sum().backward()
    assert_same(given[1].grad, given[0].grad, "input")


def test_a_replaced_parameter_is_used(pair):
    eager, ort = pair
    x = torch.randn(2, 4)
    assert_like(eager, ort, x)
    weight = torch.randn(2, 5)
    for module in (eager, ort):
        module.last.weight = torch.nn.Parameter(weight.clone())
    assert_like(eager, ort, x)


def test_a_replaced_submodule_is_used(pair):
    eager, ort = pair
    x = torch.randn(2, 4)
    assert_like(eager, ort, x)
    for module in (eager, ort):
        torch.manual_seed(5)
        module.last = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Tanh())
    assert_like(eager, ort, x)


def test_load_state_dict_and_set_data_are_seen(pair):
    eager, ort = pair
    x = torch.randn(2, 4)
    assert_like(eager, ort, x)
    state = Model().state_dict()
    eager.load_state_dict(state)
    ort.load_state_dict(state)
    assert_like(eager, ort, x)
    for module in (eager, ort):
        module.last.bias.data = torch.arange(2.0)
    assert_like(eager, ort, x)


def test_double_precision_after_a_first_run(pair):
    eager, ort = pair
    assert_like(eager, ort, torch.randn(2, 4))
    eager.double()
    ort.double()
    assert_like(eager, ort, torch.randn(2, 4, dtype=torch.float64))


# --- gradients ---


def test_no_grad_gives_outputs_without_graph(pair):
    eager, ort = pair
    x = torch.randn(2, 4)
    with torch.no_grad():
        assert not ort(x)["y"].requires_grad
        assert_same(ort(x)["y"], eager(x)["y"], "output")


def test_eval_mode_has_eagers_gradients(pair):
    eager, ort = pair
    eager.eval()
    ort.eval()
    assert_like(eager, ort, torch.randn(2, 4))


def test_a_parameter_that_the_loss_does_not_reach_keeps_no_gradient(pair):
    _, ort = pair
    ort(torch.randn(2, 4))["hidden"].sum().backward()
    assert ort.last.weight.grad is None
    assert ort.first.weight.grad is not None


def test_gradients_accumulate(pair):
    eager, ort = pair
    batches = [torch.randn(2, 4) for _ in range(3)]
    for module in (eager, ort):
        for x in batches:
            module(x)["y"].sum().backward()
    for (name, e), (_, a) in zip(eager.named_parameters(), ort.named_parameters(), strict=True):
        assert_same(a.grad, e.grad, name)


def test_two_forwards_before_their_backwards(pair):
    eager, ort = pair
    xs = [torch.randn(2, 4) for _ in range(2)]
    for module in (eager, ort):
        outputs = [module(x)["y"].square().sum() for x in xs]
        (outputs[0] * outputs[1]).backward()
    for (name, e), (_, a) in zip(eager.named_parameters(), ort.named_parameters(), strict=True):
        assert_same(a.grad, e.grad, name)


def test_the_given_gradient_is_not_written_to(pair):
    _, ort = pair
    y = ort(torch.randn(2, 4))["y"]
    gradient = torch.randn_like(y)
    before = gradient.clone()
    y.backward(gradient)
    assert torch.equal(gradient, before)


def test_a_changed_input_between_forward_and_backward_is_refused(pair):
    eager, ort = pair
    for module in (eager, ort):
        x = torch.randn(2, 4)
        loss = module(x)["y"].sum()
        x.add_(1)
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            loss.backward()


def test_double_backward_is_refused_by_name(pair):
    _, ort = pair
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(torch2ort.EngineError, match=r"create_graph=True \(double backward\)"):
        torch.autograd.grad(ort(x)["y"].sum(), x, create_graph=True)


def test_a_second_backward_without_retain_graph_raises_as_eager_does(pair):
    for module in pair:
        loss = module(torch.randn(2, 4))["y"].sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            loss.backward()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_retain_graph(dropout):
    eager = torch.nn.Sequential(Model(), Second(dropout))
    ort = torch2ort.ORTModule(copy.deepcopy(eager))
    x = torch.randn(2, 4)
    for module in (eager, ort):
        torch.manual_seed(7)
        loss = module(x).square().sum()
        torch.manual_seed(8)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
    for (name, e), (_, a) in zip(eager.named_parameters(), ort.named_parameters(), strict=True):
        assert_same(a.grad, e.grad, name)


class Second(torch.nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, outputs):
        return self.dropout(outputs["y"])


# --- errors, threads, lifetime ---


class Boom(torch.autograd.Function):
    """Raises in the direction that a flag names."""

    where = None
    error = None

    @staticmethod
    def forward(ctx, x):
        if Boom.where == "forward":
            raise Boom.error
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        if Boom.where == "backward":
            raise Boom.error
        return grad * 1


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_of_a_function_arrives_as_the_same_object(where, monkeypatch):
    class WithBoom(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def forward(self, x):
            return Boom.apply(self.layer(x))

    ort = torch2ort.ORTModule(WithBoom())
    ort(torch.randn(2, 3)).sum().backward()
    error = KeyError("mine")
    monkeypatch.setattr(Boom, "where", where)
    monkeypatch.setattr(Boom, "error", error)
    with pytest.raises(KeyError, match="mine") as caught:
        ort(torch.randn(2, 3)).sum().backward()
    assert caught.value is error
    lines = [frame.line for frame in traceback.extract_tb(error.__traceback__)]
    assert "raise Boom.error" in lines
    monkeypatch.setattr(Boom, "where", None)
    ort(torch.randn(2, 3)).sum().backward()


def test_two_threads_each_train_their_own_model():
    failures = []

    def work(seed):
        try:
            assert_trains_like_eager_without_seed(seed)
        except BaseException as error:
            failures.append(error)

    def assert_trains_like_eager_without_seed(seed):
        eager = Model()
        ort = torch2ort.ORTModule(copy.deepcopy(eager))
        for _ in range(20):
            assert_like(eager, ort, torch.randn(2, 4))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def test_a_dropped_module_is_collected():
    model = Model()
    ort = torch2ort.ORTModule(model)
    ort(torch.randn(2, 4))["y"].sum().backward()
    gone = weakref.ref(model)
    del model, ort
    gc.collect()
    assert gone() is None


def test_unused_outputs_of_functions():
    class Unused(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x):
            return TwoOutputs.apply(self.layer(x))[1]

    assert_trains_like_eager(Unused(), [(torch.randn(3, 4),)], steps=3)


def test_the_exported_model_behind_a_module_updates_the_modules_buffers():
    module, x = torch2ort.ORTModule(Stateful()), torch.randn(2, 3)
    module(x)
    eager = copy.deepcopy(module.module)
    assert_goes_on_like(module.exported, eager, x)
    torch.testing.assert_close(module.average, eager.average)
