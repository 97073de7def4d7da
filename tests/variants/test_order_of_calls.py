"""A graph does not depend on the kind of the first call."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torch2ort
from tests.support.comparison import assert_same
from torch2ort.training import autograd_function

X = torch.arange(12.0).reshape(3, 4) / 7


class Rounds(torch.autograd.Function):
    """A round that depends on ``needs_input_grad``, with a gradient that would differ if it were traced."""

    @staticmethod
    def forward(ctx, x):
        return x.round() * (2.0 if ctx.needs_input_grad[0] else 3.0)

    @staticmethod
    def backward(ctx, grad):
        return grad * 5


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.last = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.last(Rounds.apply(self.first(x) * 3))


class AsksModes(Model):
    def forward(self, x):
        hidden = self.first(x)
        if torch.is_grad_enabled():
            hidden = hidden * 2
        if hidden.requires_grad:
            hidden = hidden + 1
        if torch.is_inference_mode_enabled():
            hidden = hidden * 3
        return self.last(Rounds.apply(hidden))


def pair(kind=Model):
    torch.manual_seed(0)
    model = kind()
    return model, torch2ort.ORTModule(copy.deepcopy(model))


def step(module, x=X):
    """The output of a training step, and its gradients."""
    module.zero_grad()
    output = module(x)
    output.square().sum().backward()
    return [output.detach(), *(p.grad for p in module.parameters())]


def under_no_grad(module):
    with torch.no_grad():
        return [module(X)]


def under_inference_mode(module):
    with torch.inference_mode():
        return [module(X).clone()]


def inside_checkpoint(module):
    x = X.clone().requires_grad_()
    checkpoint(module, x, use_reentrant=True).sum().backward()
    return [x.grad]


def functional(module):
    """A functional call with other tensors than the module's own, which are not leaves."""
    module.zero_grad()
    parameters = {name: p * 2 for name, p in module.named_parameters()}
    torch.func.functional_call(module, parameters, (X,)).sum().backward()
    return [p.grad for p in module.parameters()]


def of_an_inference_tensor(module):
    with torch.inference_mode():
        x = X * 1
    with torch.no_grad():
        return [module(x)]


def of_another_size_under_no_grad(module):
    step(module)
    with torch.no_grad():
        module(X[:2])
    return step(module, X[:2])


FIRST = [
    under_no_grad, under_inference_mode, inside_checkpoint, functional, of_an_inference_tensor,
    of_another_size_under_no_grad,
]  # fmt: skip


@pytest.mark.parametrize("first", FIRST)
def test_a_step_after_another_kind_of_call_has_eagers_gradients(first):
    results = [[*first(module), *step(module), *first(module)] for module in pair()]
    for i, (expected, actual) in enumerate(zip(*results, strict=True)):
        assert_same(actual, expected, f"value {i}")


@pytest.mark.parametrize("reverse", [False, True])
def test_forward_reads_the_modes_of_the_present_call(reverse):
    calls = [step, under_no_grad, under_inference_mode]
    results = []
    for module in pair(AsksModes):
        order = calls[::-1] if reverse else calls
        results.append([value for call in (*order, *order) for value in call(module)])
    for i, (expected, actual) in enumerate(zip(*results, strict=True)):
        assert_same(actual, expected, f"value {i}")


def test_a_graph_under_no_grad_is_its_own_and_kept():
    _, ort = pair()
    step(ort)
    first = ort.exported
    under_no_grad(ort)
    assert ort.exported is not first
    step(ort)
    assert ort.exported is first


def test_a_tensor_of_inference_mode_that_backward_needs_is_refused_as_in_eager():
    for module in pair():
        with torch.inference_mode():
            x = X * 1
        with pytest.raises(
            RuntimeError, match=r"^Inference tensors cannot be saved for backward\. Please do"
        ):
            module(x)


def test_a_tensor_of_inference_mode_that_backward_does_not_need_is_taken():
    class Adds(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x + self.weight

    with torch.inference_mode():
        x = X * 1
    ort = torch2ort.ORTModule(Adds())
    ort(x).sum().backward()
    assert_same(ort.weight.grad, torch.full((4,), 3.0), "weight")


def test_a_functional_call_leaves_no_tensor_behind():
    _, ort = pair()
    functional(ort)
    # The exported model has the module's own tensors.
    assert_same(ort.exported(X), ort.module(X).detach(), "output")


class Switches(Model):
    """Leaves gradients disabled after its call."""

    def forward(self, x):
        hidden = self.first(x)
        torch.set_grad_enabled(False)
        return hidden


def test_a_forward_that_leaves_gradients_switched_off_is_refused():
    _, ort = pair(Switches)
    with pytest.raises(torch2ort.ExportError) as caught:
        ort(X)
    assert torch.is_grad_enabled()
    assert str(caught.value) == (
        "Switches: forward switches gradients off and leaves them so for the code behind its call, which a "
        "graph cannot do. Use `with torch.set_grad_enabled(False):` around the part that it is meant for"
    )


class Enables(Model):
    @torch.enable_grad()
    def forward(self, x):
        return self.last(self.first(x))


def test_gradients_that_forward_switches_on_under_no_grad_are_refused():
    _, ort = pair(Enables)
    step(ort)
    with pytest.raises(torch2ort.ExportError) as caught:
        under_no_grad(ort)
    assert str(caught.value) == (
        "Enables: forward was called with gradients switched off, switches them on itself and returns a "
        "tensor that requires one, which a graph cannot do. Call the model with gradients switched on, or "
        "return the detach() of what needs none"
    )


def test_verify_sees_a_lost_gradient(monkeypatch):
    model = Model()
    ort = torch2ort.ORTModule(model, options=torch2ort.Options(verify=True))
    run = autograd_function.run
    monkeypatch.setattr(autograd_function, "run", lambda *given: [tensor.detach() for tensor in run(*given)])
    with pytest.raises(torch2ort.EngineError) as caught:
        ort(X)
    assert str(caught.value) == (
        "verify: output 'output': eager PyTorch's requires a gradient, ONNX Runtime's does not require one"
    )


def test_an_export_in_another_mode_is_another_entry_of_the_cache(tmp_path):
    model, hits = AsksModes(), []
    for gradients in (True, False, True, False):
        with torch.set_grad_enabled(gradients):
            exported = torch2ort.export(model, X, cache_dir=tmp_path)
            torch.testing.assert_close(exported(X), model(X).detach())
        hits.append(exported.cache.hit)
    assert hits == [False, False, True, True]


def test_the_cache_keeps_a_graph_a_mode(tmp_path):
    options = torch2ort.Options(cache_dir=tmp_path)
    for _ in range(2):
        results = []
        torch.manual_seed(0)
        model = AsksModes()
        for module in (model, torch2ort.ORTModule(copy.deepcopy(model), options=options)):
            results.append([*under_no_grad(module), *step(module)])
        for i, (expected, actual) in enumerate(zip(*results, strict=True)):
            assert_same(actual, expected, f"value {i}")
