"""A step from the export cache: nothing is traced, and gradients are those of eager PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import torch2ort
from tests.differentiate import test_data_dependent_sizes as decided
from tests.pythonop.registry import test_gradients as registered
from tests.support.comparison import assert_same, assert_trains_like_eager
from tests.support.functions import Square, TwoOutputs
from tests.support.registry_cleanup import no_entries_left  # noqa: F401 - a fixture
from tests.support.sweeps import sample_cases
from torch2ort.cache.store.store import Store
from torch2ort.errors import Torch2OrtWarning
from torch2ort.runtime import optimized_model
from torch2ort.training import plan_builder

FORWARD, BACKWARD = "joint forward", "joint backward"


class OneGradient(torch.autograd.Function):
    """Returns no gradient for its second argument."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


class Unmaterialized(torch.autograd.Function):
    """Gets a missing gradient as None, and returns None for it."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.set_materialize_grads(False)
        return x * 2, y * 3

    @staticmethod
    def backward(ctx, first, second):
        return None if first is None else first * 2, None if second is None else second * 3


class Several(torch.nn.Module):
    """Outputs that share layers, a Function of each kind, a constant of the code, and unused parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x):
        self.steps.add_(1)
        a, b = self.first(x), self.second(x)
        c, d = Unmaterialized.apply(Square.apply(a), torch.tanh(b))
        e, f = TwoOutputs.apply(c + torch.tensor([1.0, 2.0, 3.0, 4.0]))
        return e + d, OneGradient.apply(d, a) * f, torch.nn.functional.gelu(b).softmax(-1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a cache that every export uses."""
    monkeypatch.setenv("TORCH2ORT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def nothing_is_traced(monkeypatch: pytest.MonkeyPatch):
    """Return a function after whose call every trace is an error."""

    def forbid() -> None:
        def fail(*args, **kwargs):
            raise AssertionError("something was traced that should have come out of the cache")

        monkeypatch.setattr(torch.export, "export", fail)
        monkeypatch.setattr(plan_builder, "trace_joint", fail)

    return forbid


def entries(cache: Path, kind: str) -> list[Path]:
    """Folders of the entries of a kind."""
    return [cache / "v1" / e.manifest.digest for e in Store(cache).list_entries() if e.manifest.kind == kind]


def compare(model: torch.nn.Module, used: tuple[int, ...], backwards: int = 1) -> torch2ort.ORTModule:
    """Gradients of the sum of some outputs, by eager PyTorch and ORTModule."""
    module = torch2ort.ORTModule(copy.deepcopy(model))
    compare_step(model, module, torch.randn(3, 4), used, backwards)
    return module


def compare_step(model, module, x: torch.Tensor, used: tuple[int, ...], backwards: int = 1) -> None:
    """The same of one step."""
    found = []
    for each in (model, module):
        given = x.clone().requires_grad_()
        outputs = each(given)
        loss = sum(outputs[i].square().sum() for i in used)
        for i in range(backwards):
            loss.backward(retain_graph=i < backwards - 1)
        found.append((outputs, given.grad))
    (expected, expected_input), (actual, actual_input) = found
    assert_same(actual, expected, "outputs")
    assert_same(actual_input, expected_input, "gradient of the input")
    for (name, e), (_, a) in zip(model.named_parameters(), module.named_parameters(), strict=True):
        assert_same(a.grad, e.grad, f"gradient of {name}")
    assert_same(module.steps, model.steps, "buffer")


ALL = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)]


@pytest.mark.parametrize("used", [(0,), (1, 2)], ids=str)
def test_a_step_out_of_the_cache_gives_eagers_gradients(cache, nothing_is_traced, monkeypatch, used) -> None:
    assert not compare(Several(), used).exported.cache.hit
    nothing_is_traced()
    monkeypatch.setattr(plan_builder, "lower_half", None)
    assert compare(Several(), used).exported.cache.hit


def test_gradients_that_the_first_process_did_not_want_are_eagers(cache, nothing_is_traced) -> None:
    compare(Several(), (0,))
    nothing_is_traced()
    for used in ALL:
        compare(Several(), used)


def test_gradients_that_another_process_wanted_first_are_kept(cache, nothing_is_traced, monkeypatch) -> None:
    compare(Several(), (0,))
    compare(Several(), (1, 2))
    nothing_is_traced()
    monkeypatch.setattr(plan_builder, "lower_half", None)
    compare(Several(), (1, 2))


def test_sizes_that_vary_have_gradients_that_no_process_wanted_before(cache, nothing_is_traced) -> None:
    def run(used: tuple[int, ...], *sizes: int) -> torch2ort.ORTModule:
        model = Several()
        module = torch2ort.ORTModule(copy.deepcopy(model))
        for rows in sizes:
            model.zero_grad()
            module.zero_grad()
            compare_step(model, module, torch.randn(rows, 4), used)
        return module

    run((0,), 3, 5)
    nothing_is_traced()
    for used in ALL:
        assert run(used, 6, 9, 2).exported.cache.hit


def test_a_retained_graph_out_of_the_cache_does_not_run_forward_again(cache) -> None:
    compare(Several(), (1,))
    compare(Several(), (1,), backwards=3)
    for _ in range(2):
        module = torch2ort.ORTModule(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)))
        loss = module(torch.randn(3, 4)).sum()
        drawn = torch.get_rng_state()
        for _ in range(2):
            loss.backward(retain_graph=True)
        assert torch.equal(torch.get_rng_state(), drawn)


def test_a_process_that_only_runs_forward_leaves_a_backward_to_be_made(cache, nothing_is_traced) -> None:
    torch2ort.ORTModule(Several())(torch.randn(3, 4))
    assert (len(entries(cache, FORWARD)), entries(cache, BACKWARD)) == (1, [])
    torch2ort.ORTModule(Several())(torch.randn(3, 4, requires_grad=True))
    nothing_is_traced()
    compare(Several(), (0, 1))


@pytest.mark.parametrize("kind", sample_cases([FORWARD, BACKWARD], 2))
def test_an_entry_that_was_thrown_away_is_made_again(cache, kind) -> None:
    compare(Several(), (0, 1))
    for folder in entries(cache, kind):
        Store(cache).remove(folder.name)
    assert compare(Several(), (0, 1)).exported.cache.hit
    assert len(entries(cache, FORWARD)) == len(entries(cache, BACKWARD)) == 1


@pytest.mark.parametrize("kind", sample_cases([FORWARD, BACKWARD], 2, start=1))
def test_a_damaged_entry_is_a_warning_and_made_again(cache, kind) -> None:
    compare(Several(), (0, 1))
    (folder,) = entries(cache, kind)
    for file in list(folder.iterdir()):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        with pytest.warns(Torch2OrtWarning, match="is damaged and is made again"):
            compare(Several(), (0, 1))
    assert len(entries(cache, kind)) == 1


@pytest.mark.parametrize("used", [(0, 1), (2,)])
def test_a_session_out_of_the_cache_opens_without_optimising(cache, monkeypatch, used) -> None:
    compare(Several(), used)
    monkeypatch.setattr(optimized_model, "_optimized", None)
    assert compare(Several(), used).exported.cache.hit


def test_what_onnxruntime_does_not_write_down_trains_like_eager(cache, monkeypatch) -> None:
    monkeypatch.setattr(optimized_model, "_optimized", lambda *_: None)
    for _ in range(2):
        compare(Several(), (0, 1))
    assert not entries(cache, "optimised backward")


def test_a_step_of_large_weights_is_kept_without_them(cache) -> None:
    torch2ort.ORTModule(torch.nn.Linear(600, 600))(torch.randn(2, 600)).sum().backward()
    sizes = {e.manifest.kind: e.size for e in Store(cache).list_entries()}
    assert sizes.keys() == {"graph", FORWARD, BACKWARD, "optimised forward", "optimised backward"}
    assert sum(sizes.values()) < 100_000


def test_other_values_of_the_parameters_are_a_hit_that_trains(cache, nothing_is_traced) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3))
    batches = [(torch.randn(6, 4),)]
    assert_trains_like_eager(copy.deepcopy(model), batches, steps=2)
    nothing_is_traced()
    for value in model.parameters():
        torch.nn.init.normal_(value)
    assert assert_trains_like_eager(model, batches, steps=4).exported.cache.hit


@pytest.mark.parametrize(
    "body", ["the selection itself", "columns", "a Function's", "added back", "two selections"]
)
def test_sizes_that_values_decide_are_kept(cache, nothing_is_traced, monkeypatch, body) -> None:
    model = decided.Model(decided.BODIES[body])
    expected = decided.results(copy.deepcopy(model), decided.CALLS)
    first = torch2ort.ORTModule(copy.deepcopy(model))
    for rows, selected in decided.CALLS:
        # Backward is not built here, but later, from the joint graph in the cache.
        mask = torch.tensor([bool(selected >> i & 1) for i in range(rows)])
        first(torch.randn(rows, 4, requires_grad=True), mask)
    nothing_is_traced()
    found = decided.results(torch2ort.ORTModule(copy.deepcopy(model)), decided.CALLS)
    torch.testing.assert_close(found, expected, equal_nan=True, check_stride=False)
    monkeypatch.setattr(plan_builder, "lower_half", None)
    found = decided.results(torch2ort.ORTModule(copy.deepcopy(model)), decided.CALLS)
    torch.testing.assert_close(found, expected, equal_nan=True, check_stride=False)


@pytest.mark.parametrize("function", [registered.Mapped.apply, torch.celu], ids=["function", "operator"])
def test_registered_gradients_are_kept(cache, nothing_is_traced, monkeypatch, function) -> None:
    torch2ort.register_exporter(registered.Mapped, registered.one_after_the_other)
    torch2ort.register_gradient("Celu", lambda g, inputs, outputs, grads, alpha: grads[0])
    torch2ort.register_gradient("Elu", lambda g, inputs, outputs, grads, alpha: g.op("Mul", grads[0], 3))
    model, sizes = registered.Layer(function), (3, 5, 2)
    batches = [torch.randn(rows, 4) for rows in sizes]
    with monkeypatch.context() as without:
        without.delenv("TORCH2ORT_CACHE_DIR")
        own = torch2ort.ORTModule(copy.deepcopy(model))
        expected = [registered.gradients(own, x) for x in batches]
    first = torch2ort.ORTModule(copy.deepcopy(model))
    for x in batches:
        first(x)
    nothing_is_traced()
    for _ in range(2):
        module = torch2ort.ORTModule(copy.deepcopy(model))
        found = [registered.gradients(module, x) for x in batches]
        assert_same(found, expected, "gradients")
        monkeypatch.setattr(plan_builder, "lower_half", None)


def times(factor):
    return lambda g, inputs, outputs, grads, alpha: g.op("Mul", grads[0], factor)


def test_another_registered_gradient_is_another_entry(cache) -> None:
    model, x = registered.Layer(torch.celu), torch.randn(3, 4)
    found = []
    for factor in (2, 3):
        torch2ort.register_gradient("Celu", times(factor), override=True)
        found.append(registered.gradients(torch2ort.ORTModule(copy.deepcopy(model)), x))
    assert_same([gradient * 3 for gradient in found[0]], [gradient * 2 for gradient in found[1]], "gradients")
