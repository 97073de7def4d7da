"""Each operator and its derivative alone, as ONNX operators, compared with PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from torch2ort.training_files.lowered_step import lower_step
from torch2ort.training_files.onnx_target import plain_target
from torch2ort.training_files.step_graph import StepGraph

OPSETS = [
    pytest.param(18, id="opset 18"),
    pytest.param(21, marks=pytest.mark.long, id="opset 21"),
]

generator = torch.Generator().manual_seed(5)


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def labels(count: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, count, shape, generator=generator)


IGNORING = torch.tensor([1, -100, 0, 2])
# name -> function, and its tensors; those of floating point get a gradient.
CASES: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor]]] = {
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1), [r(2, 3, 9), r(4, 3, 3), r(4)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [r(2, 3, 5, 6), r(4, 3, 3, 3), r(4)]),
    "conv2d strides that leave some over": (
        lambda x, w: F.conv2d(x, w, None, stride=(2, 3), padding=(1, 0)),
        [r(2, 2, 8, 9), r(3, 2, 3, 2)],
    ),
    "conv2d dilated": (
        lambda x, w: F.conv2d(x, w, None, dilation=2, stride=2),
        [r(1, 2, 9, 10), r(3, 2, 3, 3)],
    ),
    "conv2d groups": (lambda x, w, b: F.conv2d(x, w, b, groups=2), [r(2, 4, 5, 5), r(6, 2, 3, 3), r(6)]),
    "conv2d depthwise": (lambda x, w: F.conv2d(x, w, None, groups=4), [r(2, 4, 5, 5), r(4, 1, 3, 3)]),
    "conv3d": (lambda x, w: F.conv3d(x, w, None, padding=1), [r(1, 2, 4, 4, 4), r(2, 2, 3, 3, 3)]),
    "conv_transpose2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1),
        [r(2, 3, 4, 4), r(3, 2, 3, 3), r(2)],
    ),
    "conv_transpose2d groups": (
        lambda x, w: F.conv_transpose2d(x, w, None, stride=2, groups=2),
        [r(2, 4, 3, 3), r(4, 2, 3, 3)],
    ),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), [r(2, 3, 6, 6)]),
    "max_pool2d overlapping": (lambda x: F.max_pool2d(x, 3, 2, 1), [r(2, 3, 7, 7)]),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), [r(2, 3, 6)]),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), [r(2, 3, 6, 6)]),
    "avg_pool2d padded": (lambda x: F.avg_pool2d(x, 3, 2, 1), [r(2, 3, 7, 7)]),
    "avg_pool2d without its padding": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        [r(2, 3, 7, 7)],
    ),
    "adaptive_avg_pool2d to one": (lambda x: F.adaptive_avg_pool2d(x, 1), [r(2, 3, 6, 5)]),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (3, 2)), [r(2, 3, 7, 5)]),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        [r(4, 3, 5), r(3), r(3)],
    ),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (5,), w, b), [r(2, 3, 5), r(5), r(5)]),
    "layer_norm over two axes": (lambda x: F.layer_norm(x, (3, 5)), [r(2, 3, 5)]),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [r(2, 4, 5), r(4), r(4)]),
    "instance_norm": (lambda x: F.instance_norm(x), [r(2, 4, 5)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (5,), w), [r(2, 3, 5), r(5)]),
    "embedding": (lambda w, i: F.embedding(i, w), [r(7, 4), labels(7, 3, 5)]),
    "embedding with padding": (lambda w, i: F.embedding(i, w, 2), [r(7, 4), labels(7, 3, 5)]),
    "attention": (lambda q, k, v: _attention(q, k, v), [r(2, 2, 4, 3), r(2, 2, 5, 3), r(2, 2, 5, 3)]),
    "softmax": (lambda x: F.softmax(x, 1), [r(2, 4, 3)]),
    "log_softmax": (lambda x: F.log_softmax(x, -1), [r(2, 4, 3)]),
    "cross_entropy": (lambda x, y: F.cross_entropy(x, y), [r(4, 3), IGNORING]),
    "cross_entropy weighted": (
        lambda x, w, y: F.cross_entropy(x, y, w.detach()),
        [r(4, 3), r(3).abs(), IGNORING],
    ),
    "cross_entropy smoothed": (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), [r(4, 3), IGNORING]),
    "cross_entropy of images": (lambda x, y: F.cross_entropy(x, y), [r(2, 3, 2, 2), labels(3, 2, 2, 2)]),
    "mse_loss": (lambda x, y: F.mse_loss(x, y), [r(4, 3), r(4, 3)]),
    "l1_loss": (lambda x, y: F.l1_loss(x, y), [r(4, 3), r(4, 3)]),
    "smooth_l1_loss": (lambda x, y: F.smooth_l1_loss(x, y, beta=0.5), [r(4, 3), r(4, 3)]),
    "huber_loss": (lambda x, y: F.huber_loss(x, y, delta=0.5), [r(4, 3), r(4, 3)]),
    "binary_cross_entropy_with_logits": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
        [torch.cat([r(4, 3), torch.tensor([[-60.0, 60.0, 0.0]])]), r(5, 3)],
    ),
    "kl_div": (
        lambda x, y: F.kl_div(F.log_softmax(x, 1), F.softmax(y, 1), reduction="batchmean"),
        [r(4, 3), r(4, 3)],
    ),
    "gelu": (lambda x: F.gelu(x), [r(9)]),
    "gelu by tanh": (lambda x: F.gelu(x, approximate="tanh"), [r(9)]),
    "silu": (lambda x: F.silu(x), [r(9)]),
    "mish": (lambda x: F.mish(x), [r(9)]),
    "elu": (lambda x: F.elu(x), [r(9)]),
    "selu": (lambda x: F.selu(x), [r(9)]),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.2), [r(9)]),
    "hardswish": (lambda x: F.hardswish(x), [4 * r(9)]),
    "hardsigmoid": (lambda x: F.hardsigmoid(x), [4 * r(9)]),
    "hardtanh": (lambda x: F.hardtanh(x), [r(9)]),
    "softplus": (lambda x: F.softplus(x), [torch.cat([r(8), torch.tensor([-60.0, 60.0])])]),
    "logsigmoid": (lambda x: F.logsigmoid(x), [torch.cat([r(8), torch.tensor([-60.0, 60.0])])]),
    "glu": (lambda x: F.glu(x), [r(3, 4)]),
    "prelu": (lambda x, w: F.prelu(x, w), [r(2, 3, 4), r(3)]),
    "log1p": (lambda x: torch.log1p(x), [torch.cat([r(8).abs(), torch.tensor([1e-6, 1e12, 0.0])])]),
    "expm1": (lambda x: torch.expm1(x), [torch.cat([r(8), torch.tensor([1e-6, 9.0, -30.0])])]),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.7), [r(5), r(5)]),
    "logaddexp": (lambda x, y: torch.logaddexp(x, y), [30 * r(8), 30 * r(8)]),
    "upsample_nearest": (lambda x: F.interpolate(x, scale_factor=2), [r(1, 2, 3, 3)]),
    "reflection_pad": (lambda x: F.pad(x, (1, 2, 1, 1), mode="reflect"), [r(1, 2, 4, 4)]),
    "index": (lambda x, i: x[i], [r(5, 3), labels(5, 7)]),
    "gather": (lambda x, i: x.gather(1, i), [r(4, 5), labels(5, 4, 7)]),
    "index_select": (lambda x, i: x.index_select(0, i), [r(5, 3), labels(5, 7)]),
    "scatter_add": (lambda x, y, i: x.scatter_add(1, i, y), [r(3, 4), r(3, 6), labels(4, 3, 6)]),
    "cumsum": (lambda x: x.cumsum(1), [r(3, 4)]),
    "matmul": (lambda x, y: x @ y, [r(2, 3, 4), r(4, 5)]),
    "std": (lambda x: x.std(1), [r(3, 5)]),
    "norm": (lambda x: x.norm(dim=1), [r(3, 5)]),
    "amax": (lambda x: x.amax(1), [r(3, 5)]),
    "logsumexp": (lambda x: x.logsumexp(1), [r(3, 5)]),
    "roll": (lambda x: x.roll(2, 1), [r(3, 5)]),
    "slices": (lambda x: x[:, 1::2] * x[:, :2], [r(3, 5)]),
    "split": (lambda x: x.split(2, 1)[1] * 2, [r(3, 6)]),
    "stack": (lambda x, y: torch.stack([x, y], 1), [r(3), r(3)]),
    "tril": (lambda x: x.tril(), [r(3, 3)]),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), [r(9)]),
    "where": (lambda x, y: torch.where(x > 0, x, y), [r(9), r(9)]),
    "einsum": (lambda x, y: torch.einsum("bij,bkj->bik", x, y), [r(2, 3, 4), r(2, 5, 4)]),
}


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    seen = torch.ones(4, 5, dtype=torch.bool, device=q.device).tril()
    mask = torch.where(seen, 0.0, -torch.inf)
    return torch.ops.aten._scaled_dot_product_attention_math(q, k, v, mask)[0]


def derived(function: Callable[..., torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    """Return a function of a direction and tensors: the function's value and its gradients along it."""

    def run(direction: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
        with torch.enable_grad():
            given = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
            value = function(*given)
            wanted = [t for t in given if t.requires_grad]
            found = torch.autograd.grad(value, wanted, direction, allow_unused=True)
        return [value.detach(), *(g for g in found if g is not None)]

    return run


def directions() -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(6)
    return {
        name: torch.randn(function(*tensors).shape, generator=source)
        for name, (function, tensors) in CASES.items()
    }


@pytest.fixture(scope="module", params=OPSETS)
def results(request: pytest.FixtureRequest) -> dict[str, list[np.ndarray]]:
    """ONNX Runtime's results for every case, in one graph."""
    made = StepGraph(FakeTensorMode(allow_non_fake_inputs=True))
    feeds: dict[str, Any] = {}
    nodes = {}
    for name, direction in directions().items():
        tensors = [direction, *CASES[name][1]]
        for i, tensor in enumerate(tensors):
            nodes[name, i] = made.input(f"{name}.{i}", tensor.shape, tensor.dtype)
            feeds[f"{name}.{i}"] = tensor.numpy()
    for name, (function, tensors) in CASES.items():
        found = made.compute(derived(function), [nodes[name, i] for i in range(len(tensors) + 1)])
        made.outputs.update({f"{name}.out.{i}": node for i, node in enumerate(found)})
    model = lower_step(made, plain_target(request.param, is_step=True), {}).file()
    assert {node.domain for node in model.graph.node} == {""}
    assert [one.version for one in model.opset_import if not one.domain] == [request.param]
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings)
    values = dict(zip((o.name for o in session.get_outputs()), session.run(None, feeds), strict=True))
    return {name: [v for key, v in values.items() if key.startswith(f"{name}.out.")] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_are_those_of_torch(results, name):
    function, tensors = CASES[name]
    wanted = derived(function)(directions()[name], *tensors)
    assert len(results[name]) == len(wanted)
    for found, value in zip(results[name], wanted, strict=True):
        np.testing.assert_allclose(found, value.numpy(), rtol=1e-4, atol=1e-5)
