"""Writes of the caller to outputs between forward and backward, and the identity of outputs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional

import torch2ort
from tests.support.comparison import assert_same
from tests.support.sweeps import sample_cases

MESSAGE = "one of the variables needed for gradient computation has been modified by an inplace operation: "


class SavesResult(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.exp(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class SavesArgument(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.exp(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].exp()


class Model(torch.nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.other = torch.nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self._body = body

    def forward(self, x):
        return self._body(self, x)


def pair(body):
    torch.manual_seed(0)
    model = Model(body)
    return model, torch2ort.ORTModule(copy.deepcopy(model))


def hidden_beside(loss):
    """A body that returns a loss and the value that it was computed from."""

    def body(model, x):
        hidden = model.layer(x)
        return loss(model, hidden), hidden

    return body


def attention(model, x):
    weights = functional.softmax(model.layer(x) @ model.other(x).t(), -1)
    return (weights @ model.other(x)).sum(), weights


READ = {
    "softmax": lambda m, x: functional.softmax(m.layer(x), -1),
    "sigmoid": lambda m, x: torch.sigmoid(m.layer(x)),
    "exp": lambda m, x: torch.exp(m.layer(x)),
    "a view": lambda m, x: torch.tanh(m.layer(x)).reshape(-1),
    "a Function's result": lambda m, x: SavesResult.apply(m.layer(x)),
    "a Function's argument": lambda m, x: (lambda h: (SavesArgument.apply(h).sum(), h))(m.layer(x)),
    "between two Functions": lambda m, x: (lambda h: (SavesArgument.apply(h).sum(), h))(
        SavesResult.apply(m.layer(x))
    ),
    "hidden, a product": hidden_beside(lambda m, h: (h * h).mean()),
    "hidden, a layer": hidden_beside(lambda m, h: m.other(h).sum()),
    "attention": attention,
    "indices": lambda m, x: tuple(torch.max(m.layer(x), 1)),
}
NOT_READ = {
    "a layer's result": lambda m, x: m.layer(x),
    "a product": lambda m, x: m.layer(x) * 2,
    "a Function's result": lambda m, x: SavesArgument.apply(m.layer(x)),
    "hidden, a sum": hidden_beside(lambda m, h: (h + 1).sum()),
    "hidden, a sigmoid": hidden_beside(lambda m, h: torch.sigmoid(h).sum()),
    "a Function's result without a gradient": lambda m, x: (
        m.layer(x),
        SavesResult.apply(m.other(x).detach()),
    ),
}


def written(module, write):
    """Run, write to the last output, and run backward from the first."""
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    outputs = module(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = outputs[0].sum()
    with torch.no_grad():
        write(outputs[-1])
    loss.backward()
    return [p.grad for p in module.parameters()]


@pytest.mark.parametrize("body", READ.values(), ids=READ)
def test_a_write_to_an_output_that_backward_reads_is_refused(body):
    for module in pair(body):
        for write in (lambda t: t.zero_(), lambda t: t.view(-1)[:1].zero_()):
            with pytest.raises(RuntimeError, match="^" + MESSAGE):
                written(module, write)


def test_the_refusal_says_what_was_written_to():
    with pytest.raises(RuntimeError) as caught:
        written(pair(attention)[1], lambda t: t.zero_())
    assert str(caught.value) == MESSAGE + (
        "a tensor of float32 and shape [3, 3], which is output 1 of the model, is at version 1; expected "
        "version 0 instead. Write to a clone of it, or after backward"
    )


@pytest.mark.parametrize("name", sample_cases(NOT_READ, 2))
def test_a_write_to_an_output_that_backward_does_not_read_changes_nothing(name):
    eager, ort = (written(module, lambda t: t.zero_()) for module in pair(NOT_READ[name]))
    for actual, expected in zip(ort, eager, strict=True):
        assert_same(actual, expected, "gradient")


def test_equal_values_are_watched_together():
    """ONNX Runtime computes equal values once, so that a write to one would change the other."""

    def body(model, x):
        hidden = model.layer(x)
        return (torch.exp(hidden) * torch.exp(hidden)).sum(), torch.exp(hidden)

    with pytest.raises(RuntimeError, match="^" + MESSAGE):
        written(pair(body)[1], lambda t: t.zero_())


def test_a_second_backward_refuses_an_output_that_was_written_to_after_the_first():
    for module in pair(READ["softmax"]):
        output = module(torch.ones(2, 4))
        output.sum().backward(retain_graph=True)
        with torch.no_grad():
            output.zero_()
        with pytest.raises(RuntimeError, match="^" + MESSAGE):
            output.sum().backward()


def test_a_second_backward_does_not_mind_a_write_to_what_forward_does_not_read():
    class Reads(torch.nn.Linear):
        def forward(self, x, unread):
            return super().forward(x).softmax(-1)

    torch.manual_seed(0)
    eager = Reads(4, 4)
    gradients = []
    for module in (eager, torch2ort.ORTModule(copy.deepcopy(eager))):
        x, unread = torch.arange(8.0).reshape(2, 4), torch.ones(2, 4)
        output = module(x, unread)
        output[:, 0].sum().backward(retain_graph=True)
        unread.zero_()
        output[:, 0].sum().backward()
        gradients.append([p.grad for p in module.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])


# --- the identity of outputs ---


def test_what_forward_returns_of_its_arguments_and_tensors_is_that_very_tensor():
    for module in pair(lambda m, x: {"x": x, "y": m.layer(x), "w": m.layer.weight, "b": m.scale}):
        x = torch.ones(2, 4, requires_grad=True)
        outputs = module(x)
        assert outputs["x"] is x
        assert outputs["w"] is module.layer.weight
        assert outputs["b"] is module.scale


def test_one_tensor_that_forward_returns_twice_is_one():
    for module in pair(lambda m, x: (lambda h: (h, h))(m.layer(x))):
        first, second = module(torch.ones(2, 4))
        assert first is second


def test_an_argument_that_forward_writes_to_and_returns_holds_the_new_value():
    for module in pair(lambda m, x: (x.add_(1), m.layer(x))):
        x = torch.ones(2, 4)
        returned, output = module(x)
        output.sum().backward()
        assert returned is x
        assert_same(x, torch.full((2, 4), 2.0), "x")
        assert_same(module.layer.bias.grad, torch.full((4,), 2.0), "bias")


def test_gradients_flow_into_what_comes_back():
    results = []
    for module in pair(lambda m, x: (x, m.layer(x), m.layer.weight)):
        x = torch.ones(2, 4, requires_grad=True)
        (module(x)[0].sum() * 2 + module(x)[1].sum() + module(x)[2].square().sum()).backward()
        results.append((x.grad, module.layer.weight.grad))
    for actual, expected in zip(results[1], results[0], strict=True):
        assert_same(actual, expected, "gradient")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(lambda m, x: (m.layer(x), x.clone()), id="a copy"),
        pytest.param(lambda m, x: (m.layer(x), x.reshape(-1) * 1), id="a product with one"),
        pytest.param(lambda m, x: (m.layer(x), m.layer.weight.reshape(-1) + 0), id="of a weight"),
    ],
)
def test_a_write_to_an_output_reaches_no_argument_and_no_weight(body):
    for module in pair(body):
        x = torch.ones(2, 4)
        weight = module.layer.weight.detach().clone()
        module(x)[1].detach().zero_()
        assert_same(x, torch.ones(2, 4), "x")
        assert_same(module.layer.weight.detach(), weight, "weight")


def test_a_write_of_what_requires_a_gradient_into_an_argument_is_refused():
    ort = pair(lambda m, x: x.copy_(m.layer(x)).sum())[1]
    with pytest.raises(torch2ort.ExportError) as caught:
        ort(torch.ones(2, 4))
    assert str(caught.value) == (
        "Model: forward writes a value that requires a gradient into its argument 'x', and a graph cannot "
        "pass that gradient on. Return the value instead, or write its detach()"
    )
