"""Models in bfloat16 and float16 compute in PyTorch's kernels, so that every bit is eager PyTorch's."""

from __future__ import annotations

import copy

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch2ort

HALF = [torch.bfloat16, torch.float16]


class Written(nn.Module):
    """Formulas that ONNX Runtime or torch.onnx would fuse or decompose."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        x = self.layer(x)
        y = 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))
        y = F.dropout(y, 0.2, self.training)
        return (y**2).mean() / y.std(), torch.einsum("ij,kj->ik", y, y), y.norm(), y.cumsum(0).softmax(1)


class Convolutional(nn.Module):
    """Convolutions, running statistics, a pool and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.second, self.head = nn.Conv2d(4, 4, 3, groups=2), nn.Linear(4, 5)

    def forward(self, x):
        h = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        y = self.head(F.adaptive_avg_pool2d(F.gelu(self.second(h)), 1).flatten(1))
        return F.cross_entropy(y, torch.tensor([1, 3])), y


class Attentive(nn.Module):
    """A table, attention and normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.out = nn.Embedding(7, 8), nn.LayerNorm(8), nn.Linear(8, 7)

    def forward(self, indices):
        h = self.table(indices)
        h = h + F.scaled_dot_product_attention(h, h, h, is_causal=True)
        y = self.out(F.silu(self.norm(h)))
        return F.cross_entropy(y.flatten(0, 1), indices.flatten()), y


class Recurrent(nn.Module):
    """A recurrent net, and a loss of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.GRU(3, 4)

    def forward(self, x):
        y, _ = self.net(x)
        return F.mse_loss(y, torch.ones_like(y)), y


class Normed(nn.Module):
    """A weight that is a direction and a length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x):
        y = self.layer(x)
        return y.square().mean(), y


class Experts(nn.Module):
    """Rows in groups whose sizes depend on values, joined again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.expert = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        which = (x[:, 0] > 0).long()
        order = which.argsort(stable=True)
        first, second = self.layer(x)[order].split(F.one_hot(which, 2).sum(0).tolist())
        joined = torch.cat([self.expert(first), second.sin()]).exp()
        back = torch.zeros_like(x).index_add(0, order, joined)
        return back.square().mean(), back


# Models that are tested in float16, too: kernels give other results there.
IN_BOTH = ("Attentive", "Normed")
MODELS = {
    "Written": (Written, lambda: torch.randn(4, 8)),
    "Convolutional": (Convolutional, lambda: torch.randn(2, 3, 12, 12)),
    "Attentive": (Attentive, lambda: torch.randint(7, (2, 5))),
    "Recurrent": (Recurrent, lambda: torch.randn(5, 2, 3)),
    "Normed": (Normed, lambda: torch.randn(4, 8)),
    "Experts": (Experts, lambda: torch.randn(6, 8)),
}


def steps(module: nn.Module, given: torch.Tensor) -> list[torch.Tensor]:
    """Outputs, gradients and buffers of two training steps, and then the trained model's outputs."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    found: list[torch.Tensor] = []
    for step in range(2):
        torch.manual_seed(step)
        optimizer.zero_grad()
        outputs = module(given)
        outputs[0].backward()
        found += [o.detach() for o in outputs] + [p.grad.clone() for p in module.parameters()]
        found += [b.clone() for b in module.buffers()]
        optimizer.step()
    module.eval()
    with torch.no_grad():
        return [*found, *module(given)]


CASES = [
    pytest.param(name, dtype, marks=() if dtype is torch.bfloat16 or name in IN_BOTH else pytest.mark.long)
    for name in MODELS
    for dtype in HALF
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_training_and_inference_are_eagers_bit_by_bit(name, dtype) -> None:
    kind, make = MODELS[name]
    model, given = kind().to(dtype), make()
    given = given.to(dtype) if given.is_floating_point() else given
    expected = steps(copy.deepcopy(model), given)
    actual = steps(torch2ort.ORTModule(copy.deepcopy(model)), given)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0)


class Transposed(nn.Module):
    """Products of permuted tensors, which kernels get in their memory layout, as in eager PyTorch."""

    def forward(self, x):
        y = x.transpose(0, 2).permute(1, 2, 0) @ x.transpose(1, -1).permute(1, 2, 0)
        return y.sum().tanh(), y, x[0].t() @ x[1]


def test_kernels_bring_dimensions_into_another_order_themselves(tmp_path) -> None:
    x = torch.randn(3, 4, 4).bfloat16().requires_grad_()
    module = torch2ort.ORTModule(Transposed(), options=torch2ort.Options(save_onnx_dir=tmp_path))
    gradients = []
    for run in (module, Transposed()):
        outputs = run(x)
        outputs[0].backward()
        gradients.append((*outputs, x.grad))
        x.grad = None
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    (file,) = tmp_path.glob("*_forward.onnx")
    graph = onnx.load(file).graph
    made = {name for node in graph.node if node.op_type == "Transpose" for name in node.output}
    assert made.isdisjoint(name for node in graph.node if node.op_type == "PythonOp" for name in node.input)


class Images(nn.Module):
    """Norms of channels-last tensors, whose gradients are not channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.group, self.batch = nn.Linear(8, 8), nn.GroupNorm(2, 8), nn.BatchNorm2d(8)

    def forward(self, x):
        y = self.layer(x).permute(0, 3, 1, 2)
        return self.group(y) * self.batch(y), F.max_pool2d(y, 2), F.interpolate(y, scale_factor=2.0)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_derivatives_get_their_tensors_in_one_order(dtype) -> None:
    model = Images().to(dtype)
    x = torch.randn(2, 4, 4, 8).to(dtype)

    def gradients(run, factor):
        run.zero_grad()
        sum(
            (output * weight).sum() for output, weight in zip(run(x.to(factor[0].dtype)), factor, strict=True)
        ).backward()
        return [p.grad for p in run.parameters()]

    factor = [torch.randn(shape).to(dtype) for shape in ((2, 8, 4, 4), (2, 8, 2, 2), (2, 8, 8, 8))]
    exact = gradients(copy.deepcopy(model).double(), [f.double() for f in factor])
    eager = gradients(copy.deepcopy(model), factor)
    for a, e, x64 in zip(gradients(torch2ort.ORTModule(model), factor), eager, exact, strict=True):
        assert (a.double() - x64).norm() <= 2 * (e.double() - x64).norm() + 1e-3 * x64.norm()


class Rounded(nn.Module):
    """Casts to bfloat16, of many numbers and of few."""

    def forward(self, x):
        return x.bfloat16(), x[:2].bfloat16(), x.square().sum()


def test_many_numbers_are_rounded_by_pytorch_which_is_faster(tmp_path) -> None:
    x = torch.randn(256, 128)
    x[0, :3] = torch.tensor([float("nan"), float("inf"), 1e-45])
    module = torch2ort.ORTModule(Rounded(), options=torch2ort.Options(save_onnx_dir=tmp_path))
    outputs = [run(x.requires_grad_()) for run in (module, Rounded())]
    torch.testing.assert_close(*outputs, rtol=0, atol=0, equal_nan=True)
    (file,) = tmp_path.glob("*_forward.onnx")
    nodes = onnx.load(file).graph.node
    assert [node.op_type for node in nodes].count("Cast") == 1
    assert sum(b"_to_copy" in node.SerializeToString() for node in nodes) == 1


class Mixed(nn.Module):
    """Layers of three dtypes, as some models keep parts of themselves in other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.middle = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4)
        self.high = nn.Linear(4, 4).double()

    def forward(self, x):
        h = self.middle(self.low(x.bfloat16()).float())
        return self.high(h.double()).float() + h.half() * x.bfloat16()


def test_types_mix_as_in_eager() -> None:
    model, x = Mixed(), torch.randn(3, 4)
    module = torch2ort.ORTModule(copy.deepcopy(model))
    outputs = [m(x) for m in (module, model)]
    for output in outputs:
        output.square().mean().backward()
    torch.testing.assert_close(*outputs)
    for a, e in zip(module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, e.grad)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_a_recurrent_net_in_double_precision_has_no_kernel_in_onnxruntime(layer) -> None:
    net, x = layer(3, 4).double().eval(), torch.randn(5, 2, 3, dtype=torch.float64)
    module = torch2ort.ORTModule(copy.deepcopy(net))
    with torch.no_grad():
        torch.testing.assert_close(module(x)[0], net(x)[0], rtol=1e-12, atol=1e-14)
