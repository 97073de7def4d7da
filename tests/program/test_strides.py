"""Results of PyTorch's kernels with permuted strides can be viewed as in eager PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torch2ort
from tests.ops.indices import outcome
from tests.support.comparison import assert_trains_like_eager
from tests.support.sweeps import sample_cases
from torch2ort.pythonop.abstract_run.forward_probe import real_like
from torch2ort.sizes.symbols import size_hint


class Inverse(torch.nn.Module):
    """The inverse is in column-major order, so that its transpose is viewed without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def forward(self, x):
        matrices = self.layer(x).view(-1, 4, 4) + 3 * torch.eye(4)
        return torch.linalg.inv(matrices).mT.reshape(-1, 16)


def test_a_view_of_a_kernels_transposed_result():
    torch.manual_seed(0)
    batch = (torch.randn(3, 16, requires_grad=True),)
    assert_trains_like_eager(Inverse(), [batch], steps=3, lr=0.001)


class Codes(torch.nn.Module):
    """Makes a convolution's result channels-last by a permutation, which PyTorch may have done already."""

    def __init__(self, write: bool) -> None:
        super().__init__()
        self.conv, self._write = torch.nn.Conv2d(3, 4, 1), write

    def forward(self, x):
        hidden = self.conv(x).permute(0, 2, 3, 1).contiguous()
        rows = hidden.view(-1, 4)
        if self._write:
            rows.mul_(2.0)
        return hidden, rows


@pytest.mark.parametrize("write", [False, True])
def test_a_view_of_a_permuted_result_of_a_convolution(write):
    torch.manual_seed(0)
    images = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert_trains_like_eager(Codes(write), [(images,)], steps=2, lr=0.01)


ONES = torch.ones(4)
DRAWN = {
    "batch_norm": lambda x: F.batch_norm(x, ONES * 0, ONES),
    "logsigmoid": F.logsigmoid,
    "roll": lambda x: x.roll(1, 1),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
}
LYING = {
    "rows": torch.randn(4, 6).t(),
    "channels last": torch.randn(2, 4, 3, 5).to(memory_format=torch.channels_last),
    "another order": torch.randn(2, 3, 5, 4).permute(0, 3, 2, 1),
}


@pytest.mark.parametrize("lying", LYING)
@pytest.mark.parametrize("inplace", [False, True], ids=["", "in place"])
@pytest.mark.parametrize("name", sample_cases(DRAWN, 2))
def test_random_numbers_go_where_they_go_in_eager_behind_what_a_trace_has_in_another_order(
    name, inplace, lying
):
    x = LYING[lying]
    if name == "channel_shuffle" and x.dim() == 2:
        pytest.skip("it takes images")

    class Drawn(torch.nn.Module):
        def forward(self, x):
            return F.dropout(DRAWN[name](x), 0.4, inplace=inplace) + 0

    found = []
    for model in (Drawn(), torch2ort.ORTModule(Drawn())):
        torch.manual_seed(3)
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        result = model(leaf)
        result.square().sum().backward()
        found.append((result.detach(), leaf.grad))
    torch.testing.assert_close(found[1], found[0])


class Windows(torch.nn.Module):
    """Overlapping windows of a tensor with transposed strides, as Longformer reads them."""

    def __init__(self, *, write: bool = False) -> None:
        super().__init__()
        self.scale, self._write = torch.nn.Parameter(torch.rand(5) + 0.5), write

    def forward(self, x):
        turned = (x * self.scale).permute(2, 0, 1)
        windows = turned.as_strided((2, 4, 6), (12, 3, 1))
        if self._write:
            windows[0, 0].mul_(2.0)
        return turned, windows, turned.permute(1, 2, 0).as_strided((3, 2), (9, 4))


def compiled(model):
    model.compile(backend="torch2ort", fullgraph=True)
    return model


@pytest.mark.parametrize("dynamo", [False, True])
def test_memory_in_another_order_is_read_by_strides_as_in_eager(dynamo, monkeypatch):
    if dynamo:
        monkeypatch.setattr(torch2ort, "ORTModule", compiled)
    torch.manual_seed(0)
    batches = [(torch.randn(size, 4, 5, requires_grad=True),) for size in (2, 3, 4)]
    assert_trains_like_eager(Windows(), batches, steps=3, lr=0.001)


def test_a_write_to_memory_that_is_read_in_another_order_is_refused():
    words = (
        r"^aten.as_strided.default at .* reads the memory of a tensor with strides \(1, 20, 5\) and offset 0"
    )
    with pytest.raises(torch2ort.UnsupportedOperatorError, match=words):
        torch2ort.ORTModule(Windows(write=True))(torch.randn(2, 4, 5))


class Expanded(torch.nn.Module):
    def forward(self, x):
        y = x[:, :1].expand(-1, 4)
        y += 1
        return y


@pytest.mark.parametrize(
    "made", [torch2ort.ORTModule, lambda model: torch2ort.export(model, torch.ones(3, 4))]
)
def test_a_write_into_an_expanded_tensor_is_refused_as_in_eager(made):
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        Expanded()(torch.ones(3, 4))
    with pytest.raises(torch2ort.UnsupportedOperatorError) as caught:
        made(Expanded())(torch.ones(3, 4))
    line = Expanded.forward.__code__.co_firstlineno + 2
    assert str(caught.value) == (
        f"aten.add_.Tensor at {__file__}:{line}, in forward: y += 1 writes into a tensor of which several "
        f"elements are one place in memory, with strides (4, 0), as expand makes. Write into a clone() of it"
    )


class ViewedBeforehand(torch.autograd.Function):
    """Saves a view that is possible with some strides only."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.view(-1))
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.view(grad.shape)


class OfAFunction(torch.nn.Module):
    def forward(self, x):
        return ViewedBeforehand.apply(x.sin()) + 1


def test_a_view_in_a_function_that_eager_refuses_is_refused_with_its_error():
    model = OfAFunction()
    wrapped = torch2ort.ORTModule(model)
    wrapped(torch.ones(3, 4, requires_grad=True)).sum().backward()
    columns = torch.ones(4, 3).t().requires_grad_()
    assert outcome(wrapped, columns) == outcome(model, columns)
    assert outcome(model, columns)[0] is RuntimeError


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_made_up_data_lie_in_memory_as_the_samples_do(dtype):
    for sample in (torch.ones(4, 3).t(), torch.ones(3, 1).expand(3, 4), torch.ones(0, 3).t()):
        made = real_like(sample.to(dtype) if 0 not in sample.stride() else sample, size_hint)
        assert made.shape == sample.shape
        assert made.stride() == sample.stride()


class Turned(torch.nn.Module):
    """A function of a tensor in column-major order."""

    def __init__(self, function) -> None:
        super().__init__()
        self.scale, self.function = torch.nn.Parameter(torch.rand(8) + 0.5), function

    def forward(self, x):
        return self.function((x * self.scale).mT.contiguous().mT)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda h: F.dropout(h * 1, 0.4, inplace=True), id="dropout"),
        pytest.param(lambda h: F.dropout(h * 1, 0.0, inplace=True) * 2, id="dropout that drops nothing"),
        pytest.param(lambda h: F.dropout(h * 1, 1.0, inplace=True), id="dropout that drops all"),
        pytest.param(lambda h: F.dropout2d((h * 1)[..., None], 0.4, inplace=True), id="dropout of channels"),
        pytest.param(lambda h: F.feature_alpha_dropout((h * 1)[..., None], 0.4, inplace=True), id="alpha"),
    ],
)
def test_what_drops_in_place_drops_eagers_elements(function):
    assert_trains_like_eager(Turned(function), [(torch.randn(3, 6, 8),)], steps=2)


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda h: F.alpha_dropout(h, 0.4, training=True), "aten.alpha_dropout.default"),
        (lambda h: F.alpha_dropout(h * 1, 0.4, training=True, inplace=True), "aten.alpha_dropout_.default"),
        (lambda h: h * torch.empty_like(h).bernoulli_(0.5), "aten.bernoulli_.float"),
        (lambda h: h * (h * 1).bernoulli_(h.sigmoid()), "aten.bernoulli_.Tensor"),
    ],
)
def test_what_draws_in_place_in_another_order_is_refused(function, operator):
    words = (
        f"^{operator} at .* draws random numbers for a tensor whose dimensions lie in another order in memory"
    )
    with pytest.raises(torch2ort.UnsupportedOperatorError, match=words):
        torch2ort.ORTModule(Turned(function))(torch.randn(3, 6, 8))
