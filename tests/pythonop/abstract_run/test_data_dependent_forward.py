"""A forward that reads values of its tensors is exported, and trained, as eager PyTorch runs it."""

from __future__ import annotations

import copy
import random
import re
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.autograd import Function

import torch2ort
from tests.support.callable_module import CallableModule
from tests.support.comparison import assert_same, assert_trains_like_eager
from tests.support.sweeps import sample_cases
from torch2ort.pythonop.abstract_run import forward_probe


class ByItem(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.largest = abs(x.max().item()) + 1
        return x / ctx.largest

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.largest


class Branch(Function):
    @staticmethod
    def forward(ctx, x):
        if (x > 0.5).any():
            return x.clamp(max=0.5)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Positive(Function):
    @staticmethod
    def forward(ctx, x):
        (index,) = (x.flatten() > 0).nonzero(as_tuple=True)
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.flatten()[index]

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        return torch.zeros(ctx.shape.numel()).index_put((index,), grad).view(ctx.shape)


class Rounded(Function):
    @staticmethod
    def forward(ctx, x):
        values, index = torch.unique((x * 4).round(), return_inverse=True)
        ctx.mark_non_differentiable(index)
        return values[index] / 4, index

    @staticmethod
    def backward(ctx, grad, _):
        return grad * 1


class Cholesky(Function):
    """Needs a covariance, which made-up data is not."""

    @staticmethod
    def forward(ctx, x):
        if torch.linalg.eigvalsh(x).min().item() <= 0:
            raise ValueError("not positive definite")
        factor = torch.linalg.cholesky(x)
        ctx.save_for_backward(factor)
        return factor

    @staticmethod
    def backward(ctx, grad):
        (factor,) = ctx.saved_tensors
        return grad * factor


class Sized(Function):
    """The size of its result depends on a value."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.sum() * torch.ones(int(x.abs().max()) + 1)

    @staticmethod
    def backward(ctx, grad):
        return grad.sum().expand(ctx.shape) * 1


CALLS = {
    "item": lambda model, h: model.linear(ByItem.apply(h)),
    "branch": lambda model, h: model.linear(Branch.apply(h)),
    "nonzero": lambda model, h: Positive.apply(h),
    "unique": lambda model, h: model.linear(Rounded.apply(h)[0]),
    "cholesky": lambda model, h: Cholesky.apply(h.T @ h + torch.eye(4)),
    "size": lambda model, h: Sized.apply(h),
    "one after the other": lambda model, h: Branch.apply(ByItem.apply(Branch.apply(h))),
}


@pytest.mark.parametrize("call", sample_cases(CALLS.values(), 2), ids=CALLS)
def test_it_trains_like_eager_on_other_values_and_sizes(call):
    batches = [(torch.randn(n, 4),) for n in (3, 3, 5)]
    assert_trains_like_eager(CallableModule(call), batches, lr=0.01, steps=3)


@pytest.mark.parametrize("name", ["item", "cholesky", "size"])
def test_it_is_exported(name):
    model = CallableModule(CALLS[name]).eval()
    exported = torch2ort.export(model, torch.randn(3, 4))
    for _ in range(2):
        x = torch.randn(3, 4)
        assert_same(exported(x), model(x).detach(), name)


def test_sizes_that_do_not_depend_on_values_are_known():
    exported = torch2ort.export(CallableModule(CALLS["item"]).eval(), torch.randn(3, 4))
    shapes = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in exported.proto.graph.value_info
    }
    (node,) = (n for n in exported.proto.graph.node if n.op_type == "PythonOp")
    assert shapes[node.output[1]] == [3, 4]


class ByNumpy(Function):
    """Runs on real tensors only."""

    @staticmethod
    def forward(ctx, x, *others):
        y = torch.from_numpy(np.tanh(x.detach().numpy()))
        return sum((other * 0.5 for other in others), y)

    @staticmethod
    def backward(ctx, grad):
        return (grad * 1.5, *(grad * 0.5 for _ in ctx.needs_input_grad[1:]))


class Chosen(Function):
    """Runs on real tensors only, and the size of its result depends on a value."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return torch.from_numpy(x.detach().numpy()[x.detach().numpy()[:, 0] > 0])

    @staticmethod
    def backward(ctx, grad):
        return grad.sum().expand(ctx.shape) * 1


class Padded(Function):
    """Does the same, though no run on the sample or on made-up data shows it."""

    @staticmethod
    def forward(ctx, x):
        size = 5 if x.numpy().max() > 100 else 4
        return torch.from_numpy(np.resize(x.detach().numpy(), (3, size)))

    @staticmethod
    def backward(ctx, grad):
        return grad[:, :4] * 1


def broadcast(model, h):
    return ByNumpy.apply(h)[:, :1].expand(-1, 4)


class Mean(Function):
    """Runs on real tensors only, and returns one row."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.shape[0]
        return torch.from_numpy(x.detach().numpy().mean(0, keepdims=True))

    @staticmethod
    def backward(ctx, grad):
        return grad.expand(ctx.rows, -1) / ctx.rows


SIZES_NEEDED = {
    "expand": broadcast,
    "both": lambda model, h: ByNumpy.apply(h, ByNumpy.apply(h)),
    "sizes in Python": lambda model, h: ByNumpy.apply(h) * (2 if ByNumpy.apply(h).shape[0] > 1 else 3),
    "expand to as many rows": lambda model, h: Mean.apply(h).expand(h.shape[0], 4),
    "expand_as": lambda model, h: Mean.apply(h).expand_as(h) * 1.5,
    "broadcast in a sum": lambda model, h: h + Mean.apply(h),
    "broadcast in where": lambda model, h: torch.where(h > 0, Mean.apply(h), h),
    "after one whose size is a value": lambda model, h: ByNumpy.apply(Positive.apply(h)),
}


@pytest.mark.parametrize("name", sample_cases(SIZES_NEEDED, 2, start=1))
def test_code_that_needs_sizes_of_what_runs_on_real_tensors_only_trains_like_eager(name):
    batches = [(torch.randn(n, 4),) for n in (3, 3, 5)]
    assert_trains_like_eager(CallableModule(SIZES_NEEDED[name]), batches, lr=0.01, steps=3)


def test_a_file_holds_the_sizes_that_were_needed(tmp_path):
    model = CallableModule(broadcast).eval()
    exported = torch2ort.export(model, torch.randn(3, 4), dynamic_shapes={"x": {0: torch.export.Dim("n")}})
    exported.save(tmp_path / "model.onnx")
    loaded = torch2ort.load(tmp_path / "model.onnx", functions=[ByNumpy])
    x = torch.randn(5, 4)
    assert_same(loaded(x), model(x).detach(), "output")


def test_another_size_than_the_one_that_was_needed_is_refused():
    ort = torch2ort.ORTModule(CallableModule(lambda model, h: Padded.apply(h)[:, :1].expand(-1, 4)))
    with torch.no_grad():
        ort(torch.randn(3, 4))
        with pytest.raises(torch2ort.EngineError) as caught:
            ort(torch.full((3, 4), 1e4))
    assert str(caught.value) == (
        "tests.pythonop.abstract_run.test_data_dependent_forward.Padded: output 0 of forward has shape "
        "[3, 5], but the graph was exported for [3, 4]: forward runs on real tensors only, and the "
        "model's code needs to know the sizes of its outputs. Declare them with "
        "torch2ort.register_shape_inferer"
    )


def test_a_size_that_is_a_value_and_needed_is_refused():
    ort = torch2ort.ORTModule(CallableModule(lambda model, h: h if Chosen.apply(h).shape[0] > 1 else -h))
    with pytest.raises(
        torch2ort.ExportError, match=r"^CallableModule: the model's Python code depends on a value"
    ):
        ort(torch.tensor([[-9.0] * 4, [9.0] * 4, [0.1] * 4]))


class Everything(Function):
    """Writes wherever it can, and cannot be run on fake tensors."""

    calls = 0
    table: ClassVar[dict[int, torch.Tensor]] = {}

    @staticmethod
    def forward(ctx, x, model):
        if x.sum().item() == 0:
            return x * 0
        Everything.calls += 1
        Everything.table[x.shape[0]] = torch.ones(4)
        model.held.append(x.max().item())
        model.norm.running_mean.add_(1)
        model.norm.running_mean.numpy()
        return x * random.random() * np.random.rand() * torch.rand(())

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Normed(torch.nn.Module):
    """A model whose forward and whose Function have a side effect in each run."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.held = [1]

    def forward(self, x):
        return Everything.apply(self.norm(x), self)


def test_an_export_leaves_no_trace():
    model, x = Normed().train(), torch.randn(3, 4)
    held, state = model.held, copy.deepcopy(model.state_dict())
    buffers = list(model.buffers())
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    torch2ort.export(model, x)
    assert (Everything.calls, Everything.table) == (0, {})
    assert model.held is held
    assert held == [1]
    assert_same(dict(model.state_dict()), dict(state), "state")
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == generators[1:]
    assert list(map(id, model.buffers())) == list(map(id, buffers))


class Fails(Function):
    @staticmethod
    def forward(ctx, x):
        if x.sum().item() > 0:
            raise FAILURE
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


FAILURE = ValueError("the sum is positive")


def test_what_it_raises_on_the_sample_arrives():
    with pytest.raises(ValueError, match=r"^the sum is positive$") as caught:
        torch2ort.export(CallableModule(lambda model, h: Fails.apply(h.abs())), torch.randn(3, 4))
    assert caught.value is FAILURE


SIGNS = torch.tensor([[1.0], [-1.0], [-1.0]])


def test_expanding_a_size_that_is_a_value_is_refused():
    ort = torch2ort.ORTModule(CallableModule(lambda model, h: Chosen.apply(h.abs() * SIGNS).expand(3, 4)))
    with pytest.raises(torch2ort.UnsupportedOperatorError) as caught:
        ort(torch.randn(3, 4))
    assert re.fullmatch(
        r"the model expands at .*callable_module\.py:\d+, in forward: return self\.call\(self, "
        r"self\.linear\(x\)\) a tensor of which a size is known in a run only, where it "
        r"may be 1 or not, and a graph is for one of "
        r"the two\. If a Function gives that tensor, say its sizes with torch2ort\.register_shape_inferer; "
        r"else put this into a Function",
        str(caught.value),
    )


class Newton(Function):
    """Twenty steps, each over the entries that are not at a bound: every step has its own mask and size."""

    @staticmethod
    def forward(ctx, x):
        z = torch.zeros_like(x)
        for _ in range(20):
            free = (z > -0.5) | (x > z)
            step = (x - z)[free]
            z = z.clone()
            z[free] = z[free] + step / (2 + step.abs())
            z = z.clamp(-0.5, 0.5)
        ctx.save_for_backward(z)
        return z

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.saved_tensors[0].abs() < 0.5)


class Sums(Function):
    """Runs an operator in each of many steps."""

    @staticmethod
    def forward(ctx, x):
        for _ in range(100):
            x = x + 0.01
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * 1


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (Newton, "forward does not run on fake tensors (it makes more than 8 sizes that values decide)"),
        (Sums, "forward does not run on fake tensors (it runs more than 50 operators)"),
    ],
)
def test_a_forward_that_loops_for_long_runs_on_real_tensors_only(function, said, monkeypatch, caplog):
    monkeypatch.setattr(forward_probe, "_MOST_OPERATORS", 50 if function is Sums else 10_000)
    caplog.set_level("DEBUG", "torch2ort")
    batches = [(torch.randn(n, 4),) for n in (3, 5, 6)]
    assert_trains_like_eager(CallableModule(lambda model, h: function.apply(h)), batches, steps=3)
    name = f"{__name__}.{function.__name__}"
    assert f"{name}: {said}; running it once on real ones" in caplog.messages
