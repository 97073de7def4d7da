"""Arguments that export_training accepts and refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.nn import functional as F

import torch2ort
from tests.training_files.eager_comparison import as_numpy
from torch2ort import optim
from torch2ort.artifacts import TrainingSession
from torch2ort.errors import (
    EngineError,
    ExportError,
    OptionError,
    SchemaError,
    SchemaMismatchError,
    UnsupportedOperatorError,
)


class Tied(torch.nn.Module):
    """A table that is read twice, and a parameter on which the loss does not depend."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, 4)
        self.out = torch.nn.Linear(4, 5, bias=False)
        self.out.weight = self.table.weight
        self.unread = torch.nn.Parameter(torch.ones(2))

    def forward(self, tokens):
        return self.out(self.table(tokens))


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A model with tied weights and a user's own optimizer, and the folder of its step."""

    def falling(parameters, gradients, state, lr):
        step = state["step"] + 1
        return {n: p - lr / step * gradients[n] for n, p in parameters.items()}, {"step": step}

    falling.init = lambda parameters: {"step": torch.zeros(())}
    falling.lr = 0.5
    torch.manual_seed(3)
    model, tokens = Tied(), torch.tensor([0, 3, 3, 1])
    folder = tmp_path_factory.mktemp("tied")
    torch2ort.export_training(
        model, (tokens, tokens), loss=F.cross_entropy, optimizer=falling, trainable="table.*"
    ).save(folder)
    return model, folder, tokens


def test_an_own_optimizer_and_tied_weights(tied, tmp_path):
    model, folder, tokens = tied
    session = TrainingSession(folder)
    weight = model.table.weight.detach().clone().requires_grad_(True)
    for step in range(1, 4):
        loss = F.cross_entropy(F.linear(F.embedding(tokens, weight), weight), tokens)
        (gradient,) = torch.autograd.grad(loss, weight)
        weight = (weight - 0.5 / step * gradient).detach().requires_grad_(True)
        assert session.step((tokens.numpy(), tokens.numpy()))["loss"] == pytest.approx(loss.item(), rel=1e-4)
    np.testing.assert_allclose(session.parameters()["table.weight"], weight.detach(), rtol=1e-4, atol=1e-5)
    session.save_checkpoint(tmp_path / "now")
    from safetensors.numpy import load_file

    found = load_file(tmp_path / "now")
    assert sorted(found) == ["optimizer.step", "out.weight", "table.weight"]
    np.testing.assert_array_equal(found["out.weight"], found["table.weight"])


def test_an_index_outside_of_its_table_is_an_error(tied):
    _, folder, tokens = tied
    session = TrainingSession(folder)
    before = session.parameters()["table.weight"]
    with pytest.raises(EngineError, match="out of data bounds"):
        session.step((np.array([0, 1, 2, 9]), tokens.numpy()))
    with pytest.raises(EngineError, match="Out of range value in index tensor"):
        session.step((tokens.numpy(), np.array([0, 1, 2, -2])))
    np.testing.assert_array_equal(session.parameters()["table.weight"], before)


def test_the_model_is_afterwards_as_before(tied):
    model, _, _ = tied
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_a_convolution_trains_with_any_batch(tmp_path):
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Conv1d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(6, 2))
    batch = torch.export.Dim("batch", min=2, max=32)
    torch2ort.export_training(
        model,
        (torch.randn(4, 1, 5), torch.zeros(4, dtype=torch.int64)),
        loss=F.cross_entropy,
        dynamic_shapes=({0: batch}, {0: batch}),
    ).save(tmp_path)
    session = TrainingSession(tmp_path)
    x, y = torch.randn(20, 1, 5), torch.zeros(20, dtype=torch.int64)
    session.lr = 0.0
    for size in (3, 15, 20):
        wanted = F.cross_entropy(model(x[:size]), y[:size]).item()
        assert session.step((x[:size].numpy(), y[:size].numpy()))["loss"] == pytest.approx(wanted, rel=1e-4)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Squared(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x):
        return Square.apply(self.layer(x)).sum()


def test_a_function_that_is_mapped_trains(tmp_path):
    torch2ort.register_exporter(Square)(lambda g, x: g.op("Mul", x, x))
    torch2ort.register_gradient("Mul")(
        lambda g, inputs, outputs, grads: (
            g.op("Mul", grads[0], inputs[1]),
            g.op("Mul", grads[0], inputs[0]),
        )
    )
    try:
        torch.manual_seed(4)
        model, x = Squared(), torch.randn(2, 3)
        artifacts = torch2ort.export_training(model, x, optimizer=optim.SGD(lr=0.1))
    finally:
        torch2ort.unregister(Square)
        torch2ort.unregister("Mul")
    assert artifacts.description.functions == []
    artifacts.save(tmp_path)
    session = TrainingSession(tmp_path)
    loss = model(x)
    loss.backward()
    assert session.step(as_numpy(x))["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        wanted = (parameter - 0.1 * parameter.grad).detach()
        np.testing.assert_allclose(session.parameters()[name], wanted, rtol=1e-4, atol=1e-5)


def export(model, sample=None, **settings):
    sample = (torch.randn(2, 3), torch.randn(2, 2)) if sample is None else sample
    return torch2ort.export_training(model, sample, **settings)


def plain(parameters, gradients, state, lr):
    assert state == {}
    return {name: value - lr * gradients[name] for name, value in parameters.items()}, state


def filling(parameters, gradients, state, lr):
    mean = state.setdefault("mean", {name: 0.1 * value for name, value in gradients.items()})
    return {name: value - lr * mean[name] for name, value in parameters.items()}, state


def test_an_own_optimizer_without_init_starts_from_an_empty_state(tmp_path):
    torch.manual_seed(3)
    model, x, y = torch.nn.Linear(3, 2), torch.randn(4, 3), torch.randn(4, 2)
    export(model, (x, y), loss=F.mse_loss, optimizer=plain).save(tmp_path)
    session = TrainingSession(tmp_path)
    assert session.description.optimizer == {}
    session.lr = 0.1
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = F.mse_loss(model(x), y)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        assert session.step((x.numpy(), y.numpy()))["loss"] == pytest.approx(loss.item(), rel=1e-5)


def forgetful(parameters, gradients, state, lr):
    return {}, state


def stateless(parameters, gradients, state, lr):
    return parameters


def numbers_only(parameters, gradients, state, lr):
    return dict.fromkeys(parameters, 0.0), state


def rounded(outputs, targets):
    return (outputs.float() - targets).square().sum()


class Widening(torch.nn.Module):
    """Computes in float32 whatever its input's dtype is, with a constant in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.register_buffer("shift", torch.tensor([0.5, -2.0, 1.0]).bfloat16())

    def forward(self, x):
        return self.layer(x.float() + self.shift.float())


def test_what_is_no_parameter_may_be_in_half_precision(tmp_path):
    torch.manual_seed(6)
    model, x, y = Widening(), torch.randn(2, 3).half(), torch.randn(2, 2)
    export(model, (x, y), loss=F.mse_loss).save(tmp_path)
    loss = TrainingSession(tmp_path).step((x.numpy(), y.numpy()))["loss"]
    assert loss == pytest.approx(F.mse_loss(model(x), y).item(), rel=1e-5)


class Rated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, learning_rate):
        return (self.weight * learning_rate).sum()


def named(name):
    return {name: lambda outputs, targets: outputs.sum()}


@pytest.mark.parametrize(
    ("run", "kind", "sentence"),
    [
        (
            lambda: export(torch.nn.Linear(3, 2), loss=F.mse_loss, trainable="*lora*"),
            OptionError,
            "trainable='*lora*': no parameter of Linear is trained; expected some of ['bias', 'weight']",
        ),
        (
            lambda: export(torch.nn.Linear(3, 2), torch.randn(2, 3)),
            ExportError,
            "the loss of a training step is a tensor of shape (2, 2); expected a tensor of one floating "
            "point number. Give loss=, a function of outputs and targets, or let the model return its loss "
            "first",
        ),
        (
            lambda: export(torch.nn.Linear(3, 2), torch.randn(2, 3), loss=F.mse_loss),
            ExportError,
            "the sample of a training step with a loss is a Tensor; expected a tuple of inputs and targets",
        ),
        (
            lambda: export(torch.nn.Linear(3, 2), ({1, 2}, torch.randn(2, 2)), loss=F.mse_loss),
            SchemaError,
            "sample[0]: a set; a sample of a training step is made of tensors, tuples, lists, dicts and "
            "numbers",
        ),
        (
            lambda: export(
                torch.nn.Linear(3, 2).half(),
                (torch.randn(2, 3).half(), torch.randn(2, 2).half()),
                loss=F.mse_loss,
            ),
            ExportError,
            "parameter 'weight' is torch.float16; expected one of torch.float32, torch.float64, in which a "
            "training step as a file computes. Convert the model before the export, with model.float()",
        ),
        (
            lambda: export(
                torch.nn.Linear(3, 2).bfloat16(),
                (torch.randn(2, 3).bfloat16(), torch.randn(2, 2)),
                loss=rounded,
            ),
            ExportError,
            "parameter 'weight' is torch.bfloat16; expected one of torch.float32, torch.float64, in which a "
            "training step as a file computes. Convert the model before the export, with model.float()",
        ),
        (
            lambda: export(Widening(), (torch.randn(2, 3).bfloat16(), torch.randn(2, 2)), loss=F.mse_loss),
            ExportError,
            "input 'inputs' is torch.bfloat16, of which numpy has no arrays; expected one of torch.float32, "
            "torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, "
            "torch.bool. Give the batch in one of them, and convert it in forward",
        ),
        (
            lambda: export(torch.nn.Linear(3, 2), loss=F.mse_loss, optimizer=forgetful),
            ExportError,
            "the optimizer gave parameters []; expected ['bias', 'weight'], as it got them",
        ),
        (
            lambda: export(torch.nn.Linear(3, 2), loss=F.mse_loss, optimizer=filling),
            ExportError,
            "the optimizer gave states ['optimizer.mean.bias', 'optimizer.mean.weight']; expected [], as it "
            "got them. One that fills its state needs an attribute init(parameters) that gives the first",
        ),
        (
            lambda: export(torch.nn.Linear(3, 2), loss=F.mse_loss, optimizer=stateless),
            ExportError,
            "the optimizer gave a dict; expected (parameters, state), two dicts",
        ),
        (
            lambda: export(torch.nn.Linear(3, 2), loss=F.mse_loss, optimizer=numbers_only),
            ExportError,
            "the optimizer gave parameter 'weight' as a float; expected a tensor",
        ),
        (
            lambda: export(torch.nn.Linear(3, 2), loss=F.mse_loss, optimizer=optim.AdamW),
            OptionError,
            "optimizer=AdamW: expected one of torch2ort.optim, such as AdamW(lr=0.001), or a function "
            "(parameters, gradients, state, lr) -> (parameters, state)",
        ),
        (
            lambda: export(
                torch.nn.Linear(3, 2),
                loss=F.mse_loss,
                optimizer=optim.AdamW(groups=[{"params": "wieght", "lr": 0.1}]),
            ),
            OptionError,
            "AdamW: groups[0] names 'wieght', which is not a parameter; expected some of ['bias', 'weight']",
        ),
        (
            lambda: export(torch.nn.Linear(3, 2), loss=F.mse_loss, trainable=["bias", "wieght"]),
            OptionError,
            "trainable: 'wieght' is not the name of a parameter; expected some of ['bias', 'weight']",
        ),
        (
            lambda: export(torch.nn.Linear(3, 2), loss="mse"),
            OptionError,
            "loss='mse': expected a function of outputs and targets, or None",
        ),
        (
            lambda: export(lambda x: x, loss=F.mse_loss),
            ExportError,
            "export_training: expected a torch.nn.Module, got function",
        ),
        (
            lambda: export(torch.nn.Linear(3, 2), loss=F.mse_loss, metrics={"loss": torch.sum}),
            OptionError,
            f"metrics['loss'] = {torch.sum!r}: expected a function, under a name that is not 'loss'",
        ),
        (
            lambda: export(torch.nn.Linear(3, 2), loss=F.mse_loss, metrics=named("weight")),
            OptionError,
            "metrics['weight']: a graph of the training step has that name for another tensor; give the "
            "metric another one",
        ),
        (
            lambda: torch2ort.export_training(Rated(), {"learning_rate": torch.ones(2)}),
            ExportError,
            "the model's argument 'learning_rate' has the name of another input of the training step; give "
            "the argument another name",
        ),
        (
            lambda: export(torch.nn.Linear(3, 2), loss=F.mse_loss, metrics=named("updated.weight")),
            OptionError,
            "metrics['updated.weight']: a graph of the training step has that name for another tensor; give "
            "the metric another one",
        ),
        (
            lambda: export(
                torch.nn.Linear(3, 2), loss=F.mse_loss, metrics={"half": lambda o, t: o.sum().bfloat16()}
            ),
            OptionError,
            "metrics['half'] is torch.bfloat16, of which numpy has no arrays; convert it with .float()",
        ),
        (
            lambda: export(torch.nn.Linear(3, 2), loss=F.mse_loss, metrics=named("targets")),
            OptionError,
            "metrics['targets']: a graph of the training step has that name for another tensor; give the "
            "metric another one",
        ),
        (
            lambda: export(
                torch.nn.Linear(3, 2), loss=lambda outputs, targets: (outputs.detach() - targets).sum()
            ),
            ExportError,
            "the loss depends on none of the trained parameters of Linear: there is nothing to train. "
            "Compute it from the model's outputs, without detach() or no_grad(), or train others",
        ),
    ],
)
def test_what_cannot_be_exported_is_named(run, kind, sentence):
    with pytest.raises(kind) as raised:
        run()
    assert str(raised.value) == sentence


def test_an_operator_that_has_only_pytorchs_kernel_is_named():
    with pytest.raises(
        UnsupportedOperatorError, match=r"^torch\.ops\.aten\.prod at .*runs in PyTorch's kernel"
    ):
        export(torch.nn.Linear(3, 2), loss=lambda outputs, targets: outputs.prod())


def test_what_onnxruntime_cannot_do_in_float64_says_so():
    with pytest.raises(
        UnsupportedOperatorError,
        match=r"^aten\.gelu\.default at .* has no exact translation to ONNX's own operators in "
        r"torch\.float64, and a file of a training step runs without PyTorch\. Convert the model with "
        r"model\.float\(\), write it with others, or register a translation with "
        r"torch2ort\.register_symbolic$",
    ):
        export(
            torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.GELU()).double(),
            (torch.randn(2, 3).double(), torch.randn(2, 2).double()),
            loss=F.mse_loss,
        )


def test_an_optimizer_that_branches_on_a_value_is_refused():
    def hesitant(parameters, gradients, state, lr):
        return {
            name: value - lr if gradients[name].sum() > 0 else value for name, value in parameters.items()
        }, state

    with pytest.raises(ExportError, match=r"^the optimizer's Python code depends on a value inside a tensor"):
        export(torch.nn.Linear(3, 2), loss=F.mse_loss, optimizer=hesitant)


def test_a_number_of_the_sample_is_compared_with_its_sign_and_nan_with_nan(tmp_path):
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 2)

        def forward(self, x, zero, none):
            return self.linear(x).sum() + zero

    export(Scaled(), (torch.randn(2, 3), 0.0, float("nan"))).save(tmp_path)
    session, x = TrainingSession(tmp_path), np.ones((2, 3), np.float32)
    session.step((x, 0.0, float("nan")))
    with pytest.raises(SchemaMismatchError) as raised:
        session.step((x, -0.0, float("nan")))
    assert str(raised.value) == "batch[1]: expected 0.0, as in the sample, given -0.0"


def test_an_optimizer_may_write_in_place(tmp_path):
    def falling(parameters, gradients, state, lr):
        for name, gradient in gradients.items():
            parameters[name].sub_(lr * gradient)
            state["steps"] += 1
        return parameters, state

    falling.init = lambda parameters: {"steps": torch.zeros(())}
    falling.lr = 0.1
    model, batch = torch.nn.Linear(3, 2), (torch.randn(2, 3), torch.randn(2, 2))
    export(model, batch, loss=F.mse_loss, optimizer=falling).save(tmp_path)
    session, optimizer = TrainingSession(tmp_path), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        assert session.step(tuple(map(np.asarray, batch)))["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(session.parameters()[name], parameter.detach(), rtol=1e-5, atol=1e-6)
    session.save_checkpoint(tmp_path / "now")
    assert load_file(tmp_path / "now")["optimizer.steps"] == 6


def test_an_operator_without_a_translation_is_named():
    with pytest.raises(UnsupportedOperatorError, match=r"has no exact translation to ONNX's own operators"):
        export(torch.nn.Linear(3, 2), loss=lambda outputs, targets: torch.erfinv(outputs).sum())


def test_uniform_numbers_are_uniform():
    from torch2ort.training_files.counter_rng import _normal, _uniform

    like = torch.empty(200, 500)
    draws = [_uniform(like, torch.tensor([seed, step]), 3) for seed, step in ((0, 0), (0, 1), (1, 0))]
    for draw in draws:
        assert draw.min() >= 0
        assert draw.max() < 1
        counts = torch.histc(draw, 20, 0, 1)
        assert (counts - 5000).abs().max() < 5 * 5000**0.5
        lagged = torch.corrcoef(torch.stack([draw.flatten()[1:], draw.flatten()[:-1]]))[0, 1]
        assert lagged.abs() < 0.02
    assert torch.corrcoef(torch.stack([d.flatten() for d in draws])).fill_diagonal_(0).abs().max() < 0.02
    normal = _normal(like, torch.tensor([5, 5]), 1)
    assert normal.mean().abs() < 0.02
    assert abs(normal.std() - 1) < 0.02


def test_a_small_number_beside_a_root_keeps_rows_that_no_batch_has_seen(tmp_path):
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 3))
    before = model[0].weight.detach().clone()
    batch = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2])
    made = torch2ort.export_training(model, batch, loss=F.cross_entropy, optimizer=optim.Adagrad(lr=0.02))
    made.save(tmp_path)
    session = TrainingSession(tmp_path)
    session.step(tuple(tensor.numpy() for tensor in batch))
    session.save_checkpoint(tmp_path / "now.safetensors")
    table = torch.from_numpy(load_file(tmp_path / "now.safetensors")["0.weight"])
    torch.testing.assert_close(table[4:], before[4:], rtol=0, atol=0)
