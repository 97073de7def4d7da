"""Operators of libraries in an ORTModule: PyTorch's dispatcher runs them, and their derivatives."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch

import torch2ort
from tests.support import library_operators as own
from tests.support.comparison import assert_same
from tests.support.sweeps import sample_cases
from torch2ort.errors import EngineError, ExportError, ModelLoadError, UnsupportedOperatorError
from torch2ort.graph.function_classes import bind_classes
from torch2ort.graph.graph_traversal import load_sites

ops = torch.ops.kernels_tests


class Model(torch.nn.Module):
    """A function between two layers, and a buffer."""

    def __init__(self, body) -> None:
        super().__init__()
        self.before, self.after = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.scale = torch.nn.Parameter(torch.rand(4) + 0.5)
        self.register_buffer("seen", torch.zeros(4))
        self.body = body

    def forward(self, x):
        h = self.before(x)
        result = self.body(self, h)
        self.seen.add_(h.detach().sum(0))
        return result


def kept_gradient(m, h):
    return own.gated(h, m.scale.detach()).sum() + h.sin().sum()


def left_out_gradient(m, h):
    return own.gated(h, -m.scale.detach()).sum() + h.sin().sum()


def constants(m, h):
    power, positions, sizes = own.parts(h, 3.0)
    return m.after(power), positions, sizes * m.scale


def values_of_all_kinds(m, h):
    plain = own.weighted([h, h * 2, m.scale.expand_as(h)], [0.5, 1.5, -1.0], None, mode="mean", times=3)
    return own.weighted([plain, h], [1.0, 2.0], m.scale, dtype=torch.float64, negative=True)


def of_one_list(m, h):
    first, second = own.halves(h)
    return first * second.exp()


BODIES = {
    "numpy, and numpy in backward": lambda m, h: m.after(own.sine(h)).tanh(),
    "twice": lambda m, h: own.sine(own.sine(h) * m.scale),
    "several results": constants,
    "values of all kinds": values_of_all_kinds,
    "a list of tensors": of_one_list,
    "random": lambda m, h: m.after(torch.dropout(own.noisy(torch.dropout(h, 0.3, True)), 0.3, True)),
    "a gradient that is there": kept_gradient,
    "a gradient that is left out": left_out_gradient,
    "a size that values decide": lambda m, h: own.positive(h).exp(),
    "by its name": lambda m, h: ops.cube(h) * m.scale,
    "one overload": lambda m, h: ops.cube.default(h) * m.scale,
    "a composite": lambda m, h: ops.composite(h, m.scale).exp(),
    "of what needs no gradient": lambda m, h: own.sine(h.detach()) + h,
    "without a gradient": lambda m, h: h * own.no_formula(h.detach()),
    "transposed": lambda m, h: own.sine(h.T).T.reshape(-1) * 2,
}


def run(module, x: torch.Tensor):
    """Outputs, gradients and buffers of one step, and the next random number."""
    torch.manual_seed(3)
    given = x.clone().requires_grad_()
    module.zero_grad()
    outputs = module(given)
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    first.double().square().sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return outputs, given.grad, gradients, dict(module.named_buffers()), torch.rand(1)


def assert_steps_alike(actual, expected) -> None:
    (outputs, given, gradients, buffers, drawn), theirs = actual, expected
    assert_same(outputs, theirs[0], "outputs")
    assert_same(given, theirs[1], "gradient of the input")
    for name, gradient in theirs[2].items():
        assert_same(gradients[name], gradient, f"gradient of {name}")
    assert_same(buffers, theirs[3], "buffers")
    assert_same(drawn, theirs[4], "the next random number")


@pytest.mark.parametrize("body", sample_cases(BODIES.values(), 2), ids=BODIES)
def test_it_trains_and_evaluates_like_eager(body) -> None:
    model, x = Model(body), torch.randn(3, 4)
    module = torch2ort.ORTModule(copy.deepcopy(model))
    assert_steps_alike(run(module, x), run(model, x))
    model.eval()
    module.eval()
    with torch.no_grad():
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        assert_same(module(x), expected, "evaluation")


@pytest.mark.parametrize(
    "body", [BODIES["values of all kinds"], lambda m, h: own.parts(h, float(len(h)))[0]], ids=["a", "b"]
)
def test_sizes_may_vary(body) -> None:
    model = Model(body)
    module = torch2ort.ORTModule(copy.deepcopy(model))
    for rows in (3, 5, 2):
        x = torch.randn(rows, 4)
        assert_steps_alike(run(module, x), run(model, x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_eagers(dtype) -> None:
    model = Model(lambda m, h: ops.cube(h) * m.scale + own.noisy(h)).to(dtype)
    x = torch.randn(3, 4, dtype=dtype)
    assert_steps_alike(run(torch2ort.ORTModule(copy.deepcopy(model)), x), run(model, x))


@pytest.mark.parametrize("product", [own.product, own.product_of_types], ids=["registered", "inside"])
def test_autocast_is_eagers(product) -> None:
    model = Model(lambda m, h: product(h, m.after.weight).exp())

    class Under(torch.nn.Module):
        def __init__(self, module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.module(x)

    x, start = torch.randn(3, 4), copy.deepcopy(model)
    expected = run(Under(model), x)
    assert_steps_alike(run(Under(torch2ort.ORTModule(start)), x), expected)


class NoGradient(torch.autograd.Function):
    """Returns no gradient, whatever gradient arrives."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return None


def test_a_derivative_to_which_nothing_arrives_runs_as_in_eager() -> None:
    model, x = Model(lambda m, h: NoGradient.apply(own.sine(h * m.scale)) + h), torch.randn(3, 4)
    assert_steps_alike(run(torch2ort.ORTModule(copy.deepcopy(model)), x), run(model, x))


def test_a_retained_graph_runs_the_derivative_again() -> None:
    model, x = Model(BODIES["random"]), torch.randn(3, 4)
    found = []
    for module in (model, torch2ort.ORTModule(copy.deepcopy(model))):
        torch.manual_seed(0)
        loss = module(x).sum()
        for _ in range(2):
            loss.backward(retain_graph=True)
        found.append([*(p.grad for p in module.parameters()), torch.rand(1)])
    assert_same(found[1], found[0], "gradients")


def test_an_operator_without_a_formula_raises_eagers_error_in_backward() -> None:
    model = Model(lambda m, h: own.no_formula(h))
    messages = []
    for module in (model, torch2ort.ORTModule(copy.deepcopy(model))):
        loss = module(torch.ones(3, 4)).sum()
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        messages.append(str(caught.value))
    assert messages[1] == messages[0]


def test_a_kernel_that_autograd_does_not_know_warns_as_in_eager() -> None:
    model, x = Model(lambda m, h: ops.undifferentiated(h) + h.sin()), torch.randn(3, 4)
    found = []
    for module in (model, torch2ort.ORTModule(copy.deepcopy(model))):
        with pytest.warns(UserWarning, match="an autograd kernel was not registered to the Autograd key"):
            found.append(run(module, x))
    assert_steps_alike(found[1], found[0])


REFUSED = {
    "writes": (
        lambda m, h: (ops.writes(h), h)[1],
        "writes to 'x', and a graph has no memory that an operator may write to. Register one that returns "
        "the new value (mutates_args=()), and copy that to where it belongs",
    ),
    "view_of": (
        lambda m, h: ops.view_of(h),
        "returns a view of an argument, and each value of a graph has memory of its own. Register one "
        "without the alias in its schema, which returns a copy",
    ),
    "count": (
        lambda m, h: ops.count(h)[0],
        "returns (Tensor, int), and a graph takes tensors, or one list of tensors. Register one that returns "
        "only tensors, with numbers as tensors without dimensions",
    ),
    "nothing": (
        lambda m, h: (ops.nothing(h), h)[1],
        "returns (), and a graph takes tensors, or one list of tensors. Register one that returns only "
        "tensors, with numbers as tensors without dimensions",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_can_hold_is_refused_by_name(name) -> None:
    body, reason = REFUSED[name]
    module = torch2ort.ORTModule(Model(body))
    with pytest.raises(UnsupportedOperatorError) as caught:
        module(torch.ones(3, 4))
    assert str(caught.value).startswith(f"kernels_tests.{name}.default at {__file__}:")
    assert str(caught.value).endswith(f" {reason}")


@pytest.mark.parametrize("operator", [ops.without_fake, own.custom_without_fake], ids=["defined", "custom"])
def test_an_operator_without_a_fake_kernel_is_refused_with_what_to_register(operator) -> None:
    with pytest.raises(ExportError) as caught:
        torch2ort.ORTModule(Model(lambda m, h: operator(h)))(torch.ones(3, 4))
    name = "custom_without_fake" if operator is own.custom_without_fake else "without_fake"
    said = str(caught.value)
    assert said.startswith(f"Model: the operator kernels_tests::{name} at {__file__}:")
    assert said.endswith(
        f" has no kernel for tensors without data, from which a trace gets the types and sizes of its "
        f"results. Register one with torch.library.register_fake('kernels_tests::{name}')"
    )


@pytest.mark.parametrize(
    ("operator", "given"),
    [
        (ops.wrong_type, "torch.float64 and of shape [3, 4]"),
        (ops.wrong_size, "torch.float32 and of shape [1, 4]"),
    ],
    ids=["type", "size"],
)
@pytest.mark.parametrize("rows", [(3,), (5, 4, 3)], ids=["fixed", "varying"])
def test_a_fake_kernel_that_is_wrong_is_told_in_the_first_run(operator, given, rows) -> None:
    model = Model(lambda m, h: (operator(h) if len(h) == rows[-1] else h) * 2)
    module = torch2ort.ORTModule(model)
    for size in rows[:-1]:
        module(torch.ones(size, 4))
    name = operator.__qualname__ if hasattr(operator, "__qualname__") else str(operator)
    name = f"kernels_tests::{name.rpartition('.')[2]}"
    with pytest.raises(EngineError) as caught:
        module(torch.ones(3, 4))
    assert str(caught.value) == (
        f"{name}: result 0 is a tensor of {given}, but its kernel for tensors without data returns "
        f"torch.float32 and [3, 4]. Correct the function passed to torch.library.register_fake({name!r})"
    )


@pytest.mark.parametrize("gradients", [True, False])
def test_random_numbers_that_no_tag_tells_of_are_told_in_the_first_run(gradients) -> None:
    module = torch2ort.ORTModule(Model(lambda m, h: own.noisy_untagged(h) - own.noisy_untagged(h)))
    with torch.set_grad_enabled(gradients), pytest.raises(EngineError) as caught:
        module(torch.ones(3, 4))
    assert str(caught.value) == (
        "kernels_tests::noisy_untagged: its kernel draws random numbers, which its registration does not "
        "declare, so a graph may reorder it, or merge two calls. Register "
        "'kernels_tests::noisy_untagged' with tags=(torch.Tag.nondeterministic_seeded,)"
    )


def test_a_file_calls_none(tmp_path) -> None:
    module = torch2ort.ORTModule(Model(BODIES["by its name"]).eval())
    with torch.no_grad():
        module(torch.ones(3, 4))
    with pytest.raises(ExportError) as caught:
        module.exported.save(tmp_path / "model.onnx")
    assert str(caught.value) == (
        "kernels_tests::cube is an operator of a library, which no file may call. Register a translation "
        "with torch2ort.register_symbolic, or put the call into a torch.autograd.Function"
    )
    (site,) = load_sites(module.exported.proto.graph).values()
    with pytest.raises(ModelLoadError) as caught:
        bind_classes([site])
    assert str(caught.value) == (
        "the model calls kernels_tests::cube, an operator of a library, which no file may call, as it may "
        "do anything. If the model is yours, put the call into a torch.autograd.Function"
    )


@pytest.mark.parametrize("body", ["numpy, and numpy in backward", "a list of tensors", "several results"])
def test_torch_compile_calls_it(body) -> None:
    model, x = Model(BODIES[body]), torch.randn(3, 4)
    module = copy.deepcopy(model)
    module.forward = torch.compile(module.forward, backend="torch2ort")
    assert_steps_alike(run(module, x), run(model, x))


# --- the export cache


@pytest.fixture
def cached(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCH2ORT_CACHE_DIR", str(tmp_path / "cache"))


class Sine(torch.nn.Module):
    """A Function that another process finds, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return own.sine(torch.ops.kernels_tests.halves(self.layer(x))[0]).exp()


# In processes of their own, as operators that other tests of this process registered are part of a key.
_ONE = """
import torch, torch2ort
from tests.kernels.test_custom_ops import Sine
torch.manual_seed(0)
module = torch2ort.ORTModule(Sine())
module(torch.ones(3, 4)).sum().backward()
print(module.exported.cache.hit, module.layer.bias.grad.tolist())
"""
_ANOTHER = f"""
import torch
def traced(*args, **kwargs):
    raise AssertionError("something was traced")
torch.export.export = traced
{_ONE}
"""


def _printed(code: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.mark.long
def test_another_process_traces_nothing(cached) -> None:
    hit, _, gradient = _printed(_ONE).partition(" ")
    assert hit == "False"
    assert _printed(_ANOTHER) == f"True {gradient}"


class Doubled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return own.doubled(x * self.scale)


def test_another_derivative_is_another_entry(cached) -> None:
    gradients, keys = [], []
    for factor in (2, 3):
        own.doubled.register_autograd(own.times(factor))
        module = torch2ort.ORTModule(Doubled())
        module(torch.ones(4)).sum().backward()
        gradients.append(module.scale.grad[0].item())
        keys.append(module.exported.cache.key)
    assert gradients == [2, 3]
    assert keys[0] != keys[1]


def test_a_derivative_that_cannot_be_seen_is_not_cached(cached) -> None:
    module = torch2ort.ORTModule(Model(BODIES["by its name"]))
    module(torch.ones(3, 4)).sum().backward()
    assert module.exported.cache.bypass_reason.endswith(
        "the derivative of the operator kernels_tests::cube was registered by the operator's name, so that "
        "its code cannot be compared between processes; define it with torch.library.custom_op."
    )
