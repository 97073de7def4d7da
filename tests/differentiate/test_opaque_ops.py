"""Recurrent nets, and matrix operators that check a value: autograd differentiates each as one operator."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch2ort
from tests.support.comparison import assert_same, assert_trains_like_eager
from tests.support.sweeps import sample_cases


class Net(nn.Module):
    """A recurrent net between dropouts, which draw their numbers in the order of the calls."""

    def __init__(self, kind, **settings) -> None:
        super().__init__()
        self.before, self.net, self.after = nn.Dropout(0.3), kind(4, 5, **settings), nn.Dropout(0.3)

    def forward(self, x):
        output, states = self.net(self.before(x))
        return self.after(output), states


class Around(nn.Module):
    """A function of scaled numbers."""

    def __init__(self, function) -> None:
        super().__init__()
        self.scale, self.function = nn.Parameter(torch.rand(4) + 0.5), function

    def forward(self, x):
        return self.function(x * self.scale)


class Matrix(nn.Module):
    """A function of a matrix that has an inverse."""

    def __init__(self, function) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        h = self.layer(x)
        return self.function(h.mT @ h + torch.eye(4))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param(nn.LSTM, {}, id="lstm"),
        pytest.param(
            nn.LSTM,
            {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.3},
            id="lstm of two layers and directions with dropout",
        ),
        pytest.param(nn.LSTM, {"proj_size": 3}, id="lstm with a projection"),
        pytest.param(nn.GRU, {"bidirectional": True, "bias": False}, id="gru"),
        pytest.param(nn.GRU, {"num_layers": 2, "dropout": 0.5}, id="gru with dropout"),
        pytest.param(nn.RNN, {"nonlinearity": "relu", "num_layers": 2}, id="rnn of relu"),
    ],
)
def test_a_recurrent_net_trains_like_eager(kind, settings) -> None:
    assert_trains_like_eager(Net(kind, **settings), [(torch.randn(3, 2, 4, requires_grad=True),)], steps=3)


def test_a_frozen_net_passes_gradients_on() -> None:
    model = Net(nn.LSTM)
    model.net.requires_grad_(False)
    assert_trains_like_eager(model, [(torch.randn(3, 2, 4, requires_grad=True),)], steps=2)


def test_a_net_that_needs_no_gradient_runs_beside_what_does() -> None:
    class Beside(Net):
        def forward(self, x, y):
            return self.net(x)[0] * y

    model = Beside(nn.GRU)
    model.net.requires_grad_(False)
    assert_trains_like_eager(
        model, [(torch.randn(3, 2, 4), torch.randn(3, 2, 5, requires_grad=True))], steps=2
    )


def test_a_net_of_which_only_the_last_state_is_used_gets_eagers_gradients() -> None:
    model = nn.GRU(4, 3)
    module = torch2ort.ORTModule(copy.deepcopy(model))
    x = torch.randn(5, 2, 4)
    for each in (model, module):
        given = x.clone().requires_grad_()
        loss = each(given)[1].sum()
        loss.backward(retain_graph=True)
        loss.backward()
        each.found = given.grad
    assert_same(module.found, model.found, "gradient of the input")
    for e, a in zip(model.parameters(), module.parameters(), strict=True):
        assert_same(a.grad, e.grad, "gradient of a weight")


@pytest.mark.skipif(
    "config.getoption('device') != 'cpu'", reason="under a mode that makes tensors there is no cache"
)
def test_a_recurrent_net_out_of_the_cache_trains_like_eager(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCH2ORT_CACHE_DIR", str(tmp_path))
    batches = [(torch.randn(3, 2, 4, requires_grad=True),)]
    for hit in (False, True):
        module = assert_trains_like_eager(Net(nn.LSTM, num_layers=2, dropout=0.3), batches, steps=2)
        assert module.exported.cache.hit == hit


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(torch.linalg.inv, id="inv"),
        pytest.param(torch.inverse, id="inverse"),
        pytest.param(torch.linalg.cholesky, id="cholesky"),
        pytest.param(lambda a: torch.linalg.solve(a, a[:, :2] * 2 + 1), id="solve"),
        pytest.param(lambda a: torch.linalg.solve(a, a[0]), id="solve for a vector"),
        pytest.param(lambda a: torch.linalg.matrix_power(a, -2), id="negative power"),
        pytest.param(lambda a: torch.linalg.tensorinv(a.view(2, 2, 4), ind=2), id="tensorinv"),
        pytest.param(lambda a: torch.linalg.tensorsolve(a, a[0]), id="tensorsolve"),
        pytest.param(lambda a: torch.linalg.lu_factor(a)[0], id="lu_factor"),
        pytest.param(lambda a: a + torch.linalg.ldl_factor(a.detach())[0], id="ldl_factor"),
        pytest.param(lambda a: torch.cholesky_solve(a[:, :1], torch.linalg.cholesky(a)), id="cholesky_solve"),
        pytest.param(lambda a: torch.linalg.inv(torch.stack([a, a + 1])), id="batch"),
    ],
)
def test_a_function_of_a_matrix_trains_like_eager(function) -> None:
    assert_trains_like_eager(Matrix(function), [(torch.randn(6, 4),)], steps=2)


@pytest.mark.parametrize("check", [torch.linalg.inv, torch.linalg.cholesky])
def test_a_matrix_that_is_refused_is_eagers_error(check) -> None:
    model = Matrix(lambda a: check(a * 0))
    module = torch2ort.ORTModule(copy.deepcopy(model))
    x = torch.randn(6, 4)
    with pytest.raises(torch.linalg.LinAlgError) as expected:
        model(x)
    with pytest.raises(torch.linalg.LinAlgError) as found:
        module(x)
    assert str(found.value) == str(expected.value)


TWICE = {
    "prod": torch.prod,
    "min": torch.min,
    "inverse": lambda h: torch.linalg.inv(h.mT @ h + torch.eye(4)),
}


@pytest.mark.parametrize("function", sample_cases(TWICE.values(), 2), ids=TWICE)
def test_two_calls_of_the_same_have_each_their_backward(function) -> None:
    model = Around(lambda h: function(h) * 2 + function(h))
    assert_trains_like_eager(model, [(torch.randn(3, 4, requires_grad=True),)], steps=2)


@pytest.mark.parametrize("function", [torch.min, torch.max, torch.median, torch.nanmedian])
def test_a_gradient_that_is_no_number_stays_where_the_number_is(function) -> None:
    model = Around(lambda h: function(h) * 2)
    x = torch.randn(3, 4, requires_grad=True)
    gradients = []
    for each in (copy.deepcopy(model), torch2ort.ORTModule(model)):
        (gradient,) = torch.autograd.grad(each(x) * torch.tensor(torch.nan), x)
        gradients.append(gradient)
    torch.testing.assert_close(gradients[1], gradients[0], equal_nan=True)
    assert 0 < gradients[0].isnan().sum() < x.numel()


@pytest.mark.parametrize("function", [torch.linalg.det, lambda w: torch.linalg.slogdet(w)[1]])
@pytest.mark.parametrize(
    "turned",
    [
        pytest.param(lambda w: w, id="as it is"),
        pytest.param(lambda w: w.t(), id="a transpose"),
        pytest.param(lambda w: torch.stack([w, w * 2]).permute(0, 2, 1), id="a permuted batch"),
    ],
)
@pytest.mark.parametrize("lies_in", ["rows", "columns"])
def test_a_determinant_has_the_gradient_of_the_matrix_as_it_lies(function, turned, lies_in) -> None:
    class Determinant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rows = torch.randn(3, 3) + 2 * torch.eye(3)
            self.matrix = nn.Parameter(rows if lies_in == "rows" else rows.mT.contiguous().mT)

        def forward(self, x):
            return function(turned(self.matrix)).sum() * x

    assert_trains_like_eager(Determinant(), [(torch.tensor(2.0),)], steps=1)


def written(h):
    """A tensor of constants into which a tensor that requires a gradient is written."""
    made = torch.ones(2, *h.shape)
    made[1] = h
    return made


def test_what_was_written_into_a_tensor_has_its_gradient_behind_an_operator_that_stays_whole() -> None:
    model = Around(lambda h: (written(h) + 1).prod(0) + written(h).prod(0))
    assert_trains_like_eager(model, [(torch.randn(3, 4, requires_grad=True),)], steps=2)
