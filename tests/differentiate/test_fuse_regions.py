"""Operators that form one region; a step with regions gives eager PyTorch's results."""

from __future__ import annotations

import copy

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch2ort
from tests.support.functions import Affine, Square
from tests.support.interpreted_regions import interpret
from tests.support.sweeps import sample_cases
from torch2ort.autotune import calibration
from torch2ort.fusion import compiled_regions
from torch2ort.fusion.region import Region, decode_region
from torch2ort.training.plan_cache import Plans


class Of(nn.Module):
    """A function of itself and of its argument, with modules around it."""

    def __init__(self, function, **modules) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.function(self, x)


@pytest.fixture
def regions(monkeypatch):
    return interpret(monkeypatch)


def known_regions() -> list[Region]:
    """The regions that were requested since the test began."""
    return [decode_region(text) for text in compiled_regions._LIBRARIES.loaded]


def step(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Outputs, gradients of parameters and of the input, and buffers."""
    torch.manual_seed(3)
    leaf = x.clone().requires_grad_()
    module.zero_grad()
    results = module(leaf)
    results = results if isinstance(results, tuple) else (results,)
    sum((r * torch.linspace(0.5, 2.0, r.numel()).view_as(r)).sum() for r in results).backward()
    grads = [p.grad for p in module.parameters()]
    return [t.detach().clone() for t in (*results, leaf.grad, *grads, *module.buffers()) if t is not None]


def fused(model: nn.Module, **options) -> nn.Module:
    return torch2ort.ORTModule(copy.deepcopy(model), options=torch2ort.Options(fuse=True, **options))


def attention(m, x):
    batch, length, _ = x.shape
    q, k, v = (layer(x).view(batch, length, 2, 4).transpose(1, 2) for layer in (m.q, m.k, m.v))
    weights = torch.softmax(q @ k.transpose(-1, -2) / 2.0, -1)
    return m.norm(x + (weights @ v).transpose(1, 2).reshape(batch, length, 8))


torch.manual_seed(1)
X = torch.randn(2, 3, 8)
A = {"a": nn.Linear(8, 8)}
AB = {**A, "b": nn.Linear(8, 8)}
CASES = {
    "a gate": Of(lambda m, x: torch.sigmoid(m.a(x)) * torch.tanh(m.b(x)), **AB),
    "attention": Of(attention, q=nn.Linear(8, 8), k=nn.Linear(8, 8), v=nn.Linear(8, 8), norm=nn.LayerNorm(8)),
    "dropout, in the order of eager's": Of(
        lambda m, x: F.dropout(torch.tanh(F.dropout(x, 0.4) * 2) + 1, 0.3) * F.dropout(m.a(x), 0.5), **A
    ),
    "Functions between operators": Of(
        lambda m, x: Square.apply(torch.tanh(Affine.apply(torch.tanh(x) * 2, m.a.bias)) + 1) * 3, **A
    ),
    "running statistics": Of(lambda m, x: torch.relu(m.norm(m.a(x))) * 2, **A, norm=nn.BatchNorm1d(3)),
    "a loss": Of(lambda m, x: F.cross_entropy(m.a(x).view(6, 8) * 2, torch.arange(6)), **A),
    "results at several places": Of(lambda m, x: (torch.tanh(x) * 2, m.a(torch.tanh(x)).exp() + 1), **A),
    "a transposed result": Of(lambda m, x: (torch.tanh(m.a(x)) * 2).transpose(0, 2), **A),
    "a mask": Of(lambda m, x: torch.where(m.a(x) > 0, x * 2, x.exp()).masked_fill(x < 0, 0.5), **A),
    "division": Of(lambda m, x: torch.div(m.a(x), 0.3, rounding_mode="floor") * x / 3 + x % 2, **A),
}


@pytest.mark.parametrize("name", sample_cases(CASES, 2))
def test_a_step_is_that_of_eager_pytorch(name, regions):
    model = copy.deepcopy(CASES[name])
    torch.testing.assert_close(step(fused(model), X), step(model, X))
    assert regions


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_a_step_in_a_half_precision_is_that_of_eager_pytorch(dtype, regions):
    model = Of(attention, **{n: nn.Linear(8, 8) for n in "qkv"}, norm=nn.LayerNorm(8)).to(dtype)
    expected = step(copy.deepcopy(model), X.to(dtype))
    assert all(map(torch.equal, step(fused(model), X.to(dtype)), expected))
    assert ["reshape", "div.Tensor", "_softmax"] in regions


def test_casts_of_autocast_are_part_of_a_region(regions):
    def of_both_types(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            return m.norm(x + torch.tanh(m.a(x)))

    model = Of(of_both_types, **A, norm=nn.LayerNorm(8))
    expected = step(copy.deepcopy(model), X)
    torch.testing.assert_close(step(fused(model), X), expected, rtol=0, atol=0)
    assert any("_to_copy" in names for names in regions)


def test_what_lies_between_products_is_one_call(regions, tmp_path):
    model = Of(lambda m, x: m.b(F.gelu(m.a(x)) * 2 + x), **AB)
    step(fused(model, save_onnx_dir=tmp_path), X)
    (file,) = tmp_path.glob("*_forward.onnx")
    names = [node.op_type for node in onnx.load(file).graph.node]
    of_interest = [name for name in names if name in ("Gemm", "PythonOp", "Gelu", "Add", "Mul")]
    assert of_interest == ["Gemm", "PythonOp", "Gemm"]


@pytest.mark.parametrize(("rows", "fuses"), [(3, True), (2048, False)], ids=["small", "large"])
def test_one_kernel_and_an_addition_are_a_region_where_tensors_are_small(rows, fuses, regions):
    model, x = Of(lambda m, x: m.norm(x + m.a(x)), **A, norm=nn.LayerNorm(8)), torch.randn(1, rows, 8)
    torch.testing.assert_close(step(fused(model), x), step(model, x))
    assert any("native_layer_norm" in names for names in regions) is fuses


def test_equal_layers_share_one_library(regions):
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()) for _ in range(4)))
    step(fused(layers), X)
    assert len(regions) <= 4


def test_what_is_computed_twice_is_written_once(regions):
    model = Of(lambda m, x: (m.a(torch.tanh(x) * 2), m.b(torch.tanh(x) * 2)), **AB)
    step(fused(model), X)
    assert regions[0].count("tanh") == 1


def test_what_a_compiler_would_write_out_over_and_over_is_cut(regions):
    def powers(m, x):
        for _ in range(40):
            x = torch.sin(x) * torch.cos(x)
        return x

    model = Of(lambda m, x: powers(m, m.a(x)), **A)
    torch.testing.assert_close(step(fused(model), X), step(model, X))
    assert len(regions) > 4


QKV = {name: nn.Linear(8, 8) for name in "qkv"}
OF_ANY_SIZE = {
    "attention": Of(attention, **QKV, norm=nn.LayerNorm(8)),
    "means over what varies": Of(lambda m, x: torch.tanh(m.a(x) - x.mean((0, 1))) * x.shape[1], **A),
    "views of all rows": Of(lambda m, x: m.b(F.gelu(m.a(x.reshape(-1, 8)) * 2) + 1).view_as(x), **AB),
    "rows alone": Of(lambda m, x: torch.sigmoid(m.a(x.flatten(0, 1)) * 2), **A),
    "a size twice over": Of(lambda m, x: torch.tanh(m.a(torch.cat([x, x], 1)) * 2), **A),
    "running statistics": Of(
        lambda m, x: torch.relu(m.norm(m.a(x).transpose(1, 2))) / 8, **A, norm=nn.BatchNorm1d(8)
    ),
    "a Function between": Of(lambda m, x: torch.tanh(Square.apply(torch.tanh(m.a(x)) / 2) + x) * 0.5, **A),
    "a loss": Of(lambda m, x: F.cross_entropy(m.a(x).flatten(0, 1) * 2, x[..., 0].flatten().long() * 0), **A),
}


@pytest.mark.parametrize("name", sample_cases(OF_ANY_SIZE, 3))
def test_regions_are_for_all_sizes_of_their_graph(name, regions):
    model = copy.deepcopy(OF_ANY_SIZE[name])
    module = fused(model)
    torch.manual_seed(5)
    for batch, length in ((2, 3), (3, 5), (5, 4), (4, 2), (7, 9)):
        x = torch.randn(batch, length, 8)
        torch.testing.assert_close(step(module, x), step(model, x))
    # The first graph serves its own sizes alone, the next all sizes.
    assert {bool(region.varying) for region in known_regions()} == {False, True}


def test_equal_layers_of_any_size_share_one_library(regions):
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()) for _ in range(4)))
    module = fused(layers)
    for rows in (2, 3, 5):
        step(module, torch.randn(rows, 8))
    assert len(regions) <= 8


def test_a_size_that_values_decide_is_part_of_no_region(regions):
    def chosen(m, x):
        h = torch.tanh(m.a(x) * 2)
        return torch.tanh(torch.sigmoid(h[h[:, 0] > 0] * 2) + 1).sum(0)

    model = Of(chosen, **A)
    torch.testing.assert_close(step(fused(model), X[0]), step(model, X[0]))
    assert all("sigmoid" not in names for names in regions)


def test_outputs_without_a_gradient_have_no_part_in_backward(regions):
    model = Of(lambda m, x: (torch.tanh(m.a(x)) * 2, torch.exp(m.b(x)) + 1), **AB)
    module = fused(model)
    for one in (0, 1):
        results = []
        for way in (model, module):
            way.zero_grad(set_to_none=True)
            way(X)[one].sum().backward()
            results.append([p.grad for p in way.parameters()])
        expected, found = results
        assert [g is None for g in found] == [g is None for g in expected]
        there = [[g for g in gradients if g is not None] for gradients in (found, expected)]
        torch.testing.assert_close(*there)


def test_steps_of_an_activation_are_not_written_out_between_regions(regions, tmp_path, monkeypatch):
    # All PythonOp nodes are regions where products are no kernels.
    monkeypatch.setattr(calibration, "faster_in_kernels", frozenset)
    monkeypatch.setattr(Plans, "_share", lambda self: 1.0)

    def gate(m, x):
        h = m.a(x)
        return m.b(torch.tanh(h * 0.8 + h * h * h) * h)

    wide = {"a": nn.Linear(8, 256), "b": nn.Linear(256, 8)}
    model, x = Of(gate, **wide), torch.randn(128, 8)
    torch.testing.assert_close(step(fused(model, save_onnx_dir=tmp_path), x), step(model, x))
    (file,) = tmp_path.glob("*_backward.onnx")
    graph = onnx.load(file).graph
    given = [[n for n in node.output if n] for node in graph.node if node.op_type == "PythonOp"]
    # The input of the next layer's weight gradient; the gradient of h, and its sum.
    assert [len(outputs) for outputs in given] == [1, 2]
