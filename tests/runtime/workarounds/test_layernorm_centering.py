"""Rows whose spread is small relative to their mean are normalized as in eager PyTorch, trained or not."""

from __future__ import annotations

import copy

import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch2ort
from tests.support.comparison import assert_same
from tests.support.sweeps import sample_cases
from torch2ort.runtime import _ort_private as private
from torch2ort.runtime.optimized_model import run_as_it_is
from torch2ort.runtime.workarounds.layernorm_centering import disabled_optimizers, subtracts_mean


class Of(nn.Module):
    """A normalization, and a function around it."""

    def __init__(self, body, layer=None) -> None:
        super().__init__()
        self.layer = layer
        self.body = body

    def forward(self, x):
        return self.body(self, x)


def written_out(model, x):
    centered = x - x.mean(-1, keepdim=True)
    return centered / torch.sqrt(centered.square().mean(-1, keepdim=True) + 1e-5)


MODELS = {
    "layer": Of(lambda m, x: m.layer(x), nn.LayerNorm(8)),
    "layer, two axes": Of(lambda m, x: m.layer(x), nn.LayerNorm((4, 8))),
    "layer, no gradient": Of(lambda m, x: m.layer(x.detach()) + x, nn.LayerNorm(8, elementwise_affine=False)),
    "layer, behind a sum": Of(lambda m, x: m.layer(x + x), nn.LayerNorm(8)),
    "layer, then a product": Of(lambda m, x: m.layer(x).square() * x, nn.LayerNorm(8)),
    "layer, by its parts": Of(lambda m, x: torch.native_layer_norm(x, (8,), None, None, 1e-5)[0]),
    "function": Of(lambda m, x: F.layer_norm(x, (8,))),
    "group": Of(lambda m, x: m.layer(x), nn.GroupNorm(2, 4)),
    "instance": Of(lambda m, x: m.layer(x), nn.InstanceNorm1d(4)),
    "written out": Of(written_out),
}


def distance(found: torch.Tensor, model: nn.Module, x: torch.Tensor) -> float:
    """The largest difference of a result from the model's in double precision."""
    with torch.no_grad():
        precise = copy.deepcopy(model).double()(x.double())
    return (found.double() - precise).abs().max().item()


@pytest.mark.parametrize("mean", [10.0, 1000.0])
@pytest.mark.parametrize(
    ("name", "trained"),
    [case for i, n in enumerate(MODELS) for case in sample_cases([(n, True), (n, False)], 2, i % 2)],
)
def test_a_small_spread_is_kept(name, trained, mean):
    model = MODELS[name]
    x = (mean + torch.randn(3, 4, 8) * 0.01).requires_grad_()
    with torch.set_grad_enabled(trained):
        found = torch2ort.ORTModule(copy.deepcopy(model))(x)
    expected = distance(model(x), model, x)
    assert distance(found, model, x) <= 4 * expected


@pytest.mark.parametrize("rows", [3, 0])
def test_a_file_normalizes_as_precisely(rows):
    model = MODELS["layer, two axes"].eval()
    x = 1000 + torch.randn(rows, 4, 8) * 0.01
    exported = torch2ort.export(model, x, dynamic_shapes=None)
    assert exported(x).shape == x.shape
    if rows:
        assert distance(exported(x), model, x) <= 4 * distance(model(x), model, x)


def test_gradients_of_a_small_spread_are_as_precise_as_eagers():
    model = MODELS["layer, then a product"]
    values = 10 + torch.randn(3, 4, 8) * 0.1

    def gradients(module, x):
        x = x.detach().requires_grad_()
        module(x).sum().backward()
        return [x.grad, module.layer.weight.grad, module.layer.bias.grad]

    precise = gradients(copy.deepcopy(model).double(), values.double())
    eager = gradients(copy.deepcopy(model), values)
    found = gradients(torch2ort.ORTModule(copy.deepcopy(model)), values)
    for f, e, p in zip(found, eager, precise, strict=True):
        assert (f - p).abs().max() <= 4 * (e - p).abs().max()


def test_a_row_of_one_number_is_zero():
    ort = torch2ort.ORTModule(MODELS["layer"])
    for x in (torch.full((2, 4, 8), 110.0), torch.full((2, 4, 8), 1234.0, requires_grad=True)):
        assert_same(ort(x).detach(), torch.zeros(2, 4, 8), "output")


@pytest.mark.parametrize("weighted", [torch.float32, None], ids=["float32 weights", "weights alike"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_statistics_of_rows_are_eagers(dtype, weighted):
    weights = [torch.full((8,), value, dtype=dtype if weighted is None else weighted) for value in (2.0, 1.0)]
    if dtype is torch.float64:
        weights = [weight.double() for weight in weights]
    model = Of(lambda m, x: torch.native_layer_norm(x, (8,), *weights, 1e-5)[1:]).eval()
    x = (3 + torch.randn(3, 8)).to(dtype)
    for actual, expected in zip(torch2ort.export(model, x)(x), model(x), strict=True):
        torch.testing.assert_close(actual, expected)


def test_statistics_of_a_batch_that_is_not_looked_at_are_empty():
    one = torch.ones(4)
    model = Of(lambda m, x: torch.native_batch_norm(x, one, one, one, one, False, 0.1, 1e-5)[1:]).eval()
    x = torch.randn(3, 4, 8)
    assert [value.shape for value in torch2ort.export(model, x)(x)] == [(0,), (0,)]


def test_a_graph_that_runs_as_it_is_is_started_without_a_trial_of_the_runtime():
    settings = onnxruntime.SessionOptions()
    assert disabled_optimizers(settings)
    subtracts_mean.cache_clear()
    run_as_it_is(settings)
    assert disabled_optimizers(settings) == []
    assert subtracts_mean.cache_info().currsize == 0


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + self.linear(x))


@pytest.mark.skipif(private.version() < (1, 30), reason="has one loop for both kernels")
def test_a_normalization_after_a_residual_has_the_vectorized_kernel(tmp_path):
    model, x = Residual().eval(), torch.randn(2, 3, 8)
    wrapped = torch2ort.ORTModule(model, options=torch2ort.Options(save_onnx_dir=tmp_path))
    with torch.no_grad():
        assert_same(wrapped(x), model(x), "output")
    (file,) = tmp_path.glob("*_inference_optimized.onnx")
    operators = {node.op_type for node in onnx.load(file).graph.node}
    assert "LayerNormalization" in operators
    assert "SkipLayerNormalization" not in operators
