"""The interface of nn.Module works on an ORTModule."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torch2ort
from tests.support.comparison import assert_same, assert_trains_like_eager
from tests.support.functions import Square


class Wrapped(torch.nn.Module):
    """Layers and a body given as a function of them."""

    def __init__(self, body, **layers) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self._body = body

    def forward(self, *args, **kwargs):
        return self._body(self, *args, **kwargs)


def test_tied_weights():
    model = Wrapped(
        lambda m, ids: m.head(torch.tanh(m.embedding(ids))),
        embedding=torch.nn.Embedding(10, 6),
        head=torch.nn.Linear(6, 10, bias=False),
    )
    model.head.weight = model.embedding.weight
    module = assert_trains_like_eager(model, [(torch.randint(0, 10, (3, 4)),)], steps=5)
    assert module.head.weight is module.embedding.weight


def test_padding_idx():
    model = Wrapped(lambda m, ids: m.embedding(ids), embedding=torch.nn.Embedding(10, 6, padding_idx=2))
    assert_trains_like_eager(model, [(torch.tensor([[2, 3], [4, 2]]),)], steps=3)


def test_a_buffer_updated_in_forward():
    def body(m, x):
        m.average.mul_(0.9).add_(x.detach().mean(0) * 0.1)
        return m.layer(x - m.average)

    model = Wrapped(body, layer=torch.nn.Linear(4, 4))
    model.register_buffer("average", torch.zeros(4))
    assert_trains_like_eager(model, [(torch.randn(3, 4),)], steps=5)


def test_an_input_written_in_forward():
    def body(m, x, state):
        state.add_(x.detach().sum())
        return m.layer(x) + state

    eager = Wrapped(body, layer=torch.nn.Linear(4, 4))
    ort = torch2ort.ORTModule(copy.deepcopy(eager))
    x = torch.randn(2, 4)
    states = [torch.zeros(1), torch.zeros(1)]
    for module, state in zip((eager, ort), states, strict=True):
        for _ in range(3):
            module(x, state).sum().backward()
    assert_same(states[1], states[0], "state")


def test_detach_and_no_grad_inside():
    def body(m, x):
        hidden = m.first(x)
        with torch.no_grad():
            scale = m.second(x).square()
        return hidden * hidden.detach() + m.first(x).detach() * scale + hidden

    model = Wrapped(body, first=torch.nn.Linear(4, 4), second=torch.nn.Linear(4, 4))
    module = assert_trains_like_eager(model, [(torch.randn(3, 4, requires_grad=True),)], steps=3)
    assert module.second.weight.grad is None


def test_a_function_under_no_grad():
    def body(m, x):
        with torch.no_grad():
            scale = Square.apply(m.layer(x))
        return m.layer(x) * scale

    assert_trains_like_eager(Wrapped(body, layer=torch.nn.Linear(4, 4)), [(torch.randn(3, 4),)], steps=3)


def test_frozen_batch_norm_in_a_training_model():
    model = Wrapped(
        lambda m, x: m.norm(m.layer(x)), layer=torch.nn.Linear(4, 4), norm=torch.nn.BatchNorm1d(4)
    )
    model.norm.eval()
    assert_trains_like_eager(model, [(torch.randn(6, 4),)], steps=3, lr=0.01)


def test_dropout_is_reproducible_and_independent_in_each_step():
    ort = torch2ort.ORTModule(torch.nn.Dropout(0.5))
    x = torch.ones(200)
    for seed in (0, 1):
        torch.manual_seed(seed)
        first, second = ort(x), ort(x)
        assert not torch.equal(first, second)
        torch.manual_seed(seed)
        assert torch.equal(ort(x), first)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant):
    def body(m, x):
        return m.last(
            checkpoint(lambda h: Square.apply(torch.tanh(m.first(h))), x * 1.0, use_reentrant=reentrant)
        )

    model = Wrapped(body, first=torch.nn.Linear(4, 4), last=torch.nn.Linear(4, 2))
    assert_trains_like_eager(model, [(torch.randn(3, 4, requires_grad=True),)], steps=3)


def test_args_kwargs_and_defaults():
    def body(m, *xs, scale=2.0, **rest):
        return m.layer(sum(xs)) * scale + sum(rest.values())

    model = Wrapped(body, layer=torch.nn.Linear(4, 4))
    ort = torch2ort.ORTModule(copy.deepcopy(model))
    x, y, z = (torch.randn(2, 4) for _ in range(3))
    for args, kwargs in [
        ((x,), {}),
        ((x, y), {"scale": 3.0}),
        ((x,), {"bias": z, "more": y}),
        ((x, y, z), {}),
    ]:
        assert_same(ort(*args, **kwargs), model(*args, **kwargs), f"{len(args)} {list(kwargs)}")


def test_data_dependent_control_flow_is_refused_clearly():
    def body(m, x):
        return m.layer(x) if x.sum() > 0 else x

    ort = torch2ort.ORTModule(Wrapped(body, layer=torch.nn.Linear(4, 4)))
    with pytest.raises(torch2ort.ExportError, match="Python code depends on a value inside a tensor"):
        ort(torch.randn(2, 4))


def test_nan_inputs_give_eagers_nans():
    model = Wrapped(lambda m, x: torch.relu(m.layer(x)), layer=torch.nn.Linear(4, 4))
    ort = torch2ort.ORTModule(copy.deepcopy(model))
    x = torch.randn(2, 4)
    x[0, 1] = float("nan")
    torch.testing.assert_close(ort(x), model(x), equal_nan=True)


def test_a_parameter_moved_to_another_device_is_refused_by_name():
    ort = torch2ort.ORTModule(torch.nn.Linear(4, 4))
    ort(torch.randn(2, 4))
    ort.to("meta")
    with pytest.raises((torch2ort.Torch2OrtError, RuntimeError), match=r"meta|device"):
        ort(torch.randn(2, 4))


def test_a_double_precision_model():
    model = Wrapped(lambda m, x: Square.apply(m.layer(x)), layer=torch.nn.Linear(4, 4)).double()
    ort = torch2ort.ORTModule(copy.deepcopy(model))
    x = torch.randn(2, 4, dtype=torch.float64)
    for module in (model, ort):
        module(x).sum().backward()
    assert_same(ort.layer.weight.grad, model.layer.weight.grad, "weight", rtol=1e-9, atol=1e-12)


def test_forwards_without_backward_do_not_grow_memory():
    code = """
        import gc, torch, torch2ort
        from tests.support.functions import Square

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(8, 8)

            def forward(self, x):
                return Square.apply(Square.apply(self.layer(x)))

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096

        module, x = torch2ort.ORTModule(Model()), torch.randn(4, 8)
        for _ in range(1000):
            module(x)
        gc.collect()
        before = resident()
        for _ in range(10_000):
            module(x)
        gc.collect()
        print((resident() - before) / 2**20)
    """
    assert _run(code, timeout=100) < 5.0


def test_the_interpreter_exits_cleanly_with_live_contexts():
    code = """
        import torch, torch2ort
        from tests.support.functions import Square

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 4)

            def forward(self, x):
                return Square.apply(self.layer(x))

        module = torch2ort.ORTModule(Model())
        kept = [module(torch.randn(2, 4)) for _ in range(5)]
        print(len(kept))
    """
    assert _run(code) == 5.0


def _run(code: str, timeout: float = 60) -> float:
    """Return the last number that a fresh interpreter prints."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return float(result.stdout.split()[-1])


def test_several_forwards_run_backward_in_turn():
    eager = Wrapped(lambda m, x: Square.apply(Square.apply(m.layer(x))), layer=torch.nn.Linear(4, 4))
    ort = torch2ort.ORTModule(copy.deepcopy(eager))
    batches = [torch.randn(2, 4) for _ in range(6)]
    for module in (eager, ort):
        losses = [module(x).square().mean() for x in batches]
        for loss in losses:
            loss.backward()
    for (name, e), (_, a) in zip(eager.named_parameters(), ort.named_parameters(), strict=True):
        assert_same(a.grad, e.grad, name)


class Attention(torch.nn.Module):
    """Attention with dropout on its weights, by the operator or by PyTorch's own module."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 24)
        self.attention = torch.nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True) if whole else None

    def forward(self, x):
        q, k, v = self.layer(x).chunk(3, -1)
        if self.attention is not None:
            return self.attention(q, k, v, need_weights=False)[0]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3)


@pytest.mark.parametrize("whole", [True, False])
def test_attention_dropout_draws_eagers_masks(whole):
    batch = (torch.randn(2, 5, 8, requires_grad=True),)
    assert_trains_like_eager(Attention(whole), [batch], steps=4, lr=0.01)


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


def test_nested_outputs():
    def body(m, x):
        h = m.layer(x)
        return {"h": [h, (h * 2,)], "pair": Pair(Square.apply(h), {"x": x, "number": 3, "none": None})}

    model = Wrapped(body, layer=torch.nn.Linear(4, 4))
    ort = torch2ort.ORTModule(copy.deepcopy(model))
    x = torch.randn(2, 4)
    gradients = []
    for module in (model, ort):
        output = module(x)
        assert isinstance(output["pair"], Pair)
        assert output["pair"].second["number"] == 3
        assert output["pair"].second["none"] is None
        (output["h"][1][0].sum() + output["pair"].first.sum()).backward()
        gradients.append((output["h"][0].detach(), module.layer.weight.grad))
    for actual, expected in zip(gradients[1], gradients[0], strict=True):
        assert_same(actual, expected, "value")


def test_several_backwards_of_parts_of_one_forward():
    model = Wrapped(lambda m, x: (Square.apply(m.layer(x)), m.layer(x).tanh()), layer=torch.nn.Linear(4, 4))
    ort = torch2ort.ORTModule(copy.deepcopy(model))
    x = torch.randn(2, 4)
    gradients = []
    for module in (model, ort):
        first, second = module(x)
        first.sum().backward(retain_graph=True)
        second.sum().backward(retain_graph=True)
        (first * second).sum().backward()
        gradients.append(module.layer.weight.grad)
    assert_same(gradients[1], gradients[0], "weight")


def test_data_inside_forward_is_a_constant_of_the_gradient():
    def body(m, x):
        h = m.layer(x)
        return h * h.data + m.layer.weight.data.sum()

    assert_trains_like_eager(Wrapped(body, layer=torch.nn.Linear(4, 4)), [(torch.randn(3, 4),)], steps=3)
    assert torch.ones(1, requires_grad=True).data.grad_fn is None


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(lambda m, x: m.layer(x) * m.layer.weight.detach().sum(), id="parameter"),
        pytest.param(lambda m, x: m.layer(x) * x.detach(), id="input"),
        pytest.param(lambda m, x: Square.apply(m.layer(x)) + m.layer.bias.detach(), id="beside a Function"),
    ],
)
def test_a_detached_parameter_or_input(body):
    batch = (torch.randn(3, 4, requires_grad=True),)
    assert_trains_like_eager(Wrapped(body, layer=torch.nn.Linear(4, 4)), [batch], steps=3)
