"""A step, a call or an export leaves no memory allocated behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch2ort
from tests.leaks import functions
from tests.ops.snippets import GROUPS
from tests.ops.sweep import Several, sample
from tests.ops.test_snippets import REFUSED, UNTRACEABLE
from tests.support.memory import bytes_left_by
from tests.support.sweeps import sample_cases
from torch2ort import optim
from torch2ort.artifacts import TrainingSession

# Above the error of a measurement, and below the size of a tensor.
NOTHING = 128

Step = Callable[[], object]


def training(model: nn.Module, *args: torch.Tensor) -> Step:
    """A training step of ``model`` on ONNX Runtime, over every output that has a gradient."""
    module = torch2ort.ORTModule(model)

    def step() -> None:
        torch.manual_seed(1)
        module.zero_grad(set_to_none=True)
        tensors = [t for t in flat(module(*args)) if t.requires_grad]
        torch.autograd.backward(tensors, [torch.ones_like(t) for t in tensors])

    return step


def flat(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def snippets(*names: str) -> Step:
    known = {name: snippet for group in GROUPS.values() for name, snippet in group.items()}
    return training(Several({name: known[name] for name in names}), sample(0))


class Layered(nn.Module):
    """A Linear in front of a function, so that a gradient passes through the function."""

    def __init__(self, layer: Any, width: int) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(width, width), layer

    def forward(self, x):
        return self.layer(self.first(x))


def of_layer(layer: Any, *shape: int) -> Step:
    return training(Layered(layer, shape[-1]), torch.randn(shape))


class Calling(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        result = self.function.apply(self.linear(x))
        return result[0] if isinstance(result, tuple) else result


def of_function(function: type[torch.autograd.Function]) -> Step:
    return training(Calling(function), torch.randn(3, 4))


def failing_backward() -> Step:
    step = of_function(functions.RaisesInBackward)

    def caught() -> None:
        with contextlib.suppress(ArithmeticError):
            step()

    return caught


def calls_of_an_export() -> Step:
    exported = torch2ort.export(Calling(functions.Saves).eval(), torch.randn(3, 4))
    return lambda: exported(torch.randn(3, 4))


def forwards_alone() -> Step:
    module = torch2ort.ORTModule(Calling(functions.Saves))
    return lambda: module(torch.randn(3, 4))


QUICK: dict[str, Callable[[], Step]] = {
    "LSTM": lambda: of_layer(nn.LSTM(8, 16, 2, batch_first=True), 2, 5, 8),
    "GRU": lambda: of_layer(nn.GRU(8, 16), 5, 2, 8),
    "RNN": lambda: of_layer(nn.RNN(8, 16), 5, 2, 8),
    "prod, inverse, order statistics": lambda: snippets("prod", "inverse", "median", "multi_margin_loss"),
    "dropout": lambda: snippets("dropout"),
    "embedding": lambda: snippets("embedding"),
    "attention": lambda: snippets("attention"),
    "convolution": lambda: snippets("conv2d"),
    "saved tensors": lambda: of_function(functions.Saves),
    "attributes of ctx": lambda: of_function(functions.Notes),
    "an output without a gradient": lambda: of_function(functions.Marks),
    "forwards without backward": forwards_alone,
    "calls of an export": calls_of_an_export,
}


@pytest.mark.parametrize("name", sample_cases(QUICK, 2))
def test_a_step_leaves_no_memory_behind(name: str):
    assert bytes_left_by(QUICK[name]()) < NOTHING


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("group", GROUPS)
def test_a_step_of_each_operator_leaves_no_memory_behind(group: str):
    names = [name for name in GROUPS[group] if name not in UNTRACEABLE | REFUSED]
    left = {
        part: bytes_left_by(snippets(*part))
        for part in (tuple(names[i : i + 6]) for i in range(0, len(names), 6))
    }
    assert {part: count for part, count in left.items() if count >= NOTHING} == {}


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(8, 3), (2, 8)),
    "Bilinear, of two": (lambda: Twofold(nn.Bilinear(8, 8, 3)), (2, 8)),
    "Conv1d": (lambda: nn.Conv1d(3, 4, 3), (2, 3, 8)),
    "Conv2d": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 6, 6)),
    "Conv3d": (lambda: nn.Conv3d(3, 4, 3), (2, 3, 5, 5, 5)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 4, 3), (2, 3, 6, 6)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), (2, 3, 6, 6)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (2, 4, 6)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, affine=True), (2, 4, 6)),
    "LayerNorm": (lambda: nn.LayerNorm(8), (2, 8)),
    "RMSNorm": (lambda: nn.RMSNorm(8), (2, 8)),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), (2, 4, 6)),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), (2, 3, 6, 6)),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), (2, 3, 6, 6)),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d(2), (2, 3, 5, 5)),
    "Upsample": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (2, 3, 6, 6)),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), (2, 4, 6, 6)),
    "Dropout2d": (lambda: nn.Dropout2d(0.3), (2, 4, 6, 6)),
    "AlphaDropout": (lambda: nn.AlphaDropout(0.3), (2, 8)),
    "PReLU": (lambda: nn.PReLU(4), (2, 4, 6)),
    "RReLU": (lambda: nn.RReLU(), (2, 8)),
    "Softmax": (lambda: nn.Softmax(-1), (2, 8)),
    "LSTM, both ways": (lambda: nn.LSTM(8, 4, 2, bidirectional=True, dropout=0.2), (5, 2, 8)),
    "LSTM, projected": (lambda: nn.LSTM(8, 4, proj_size=2), (5, 2, 8)),
    "GRU, both ways": (lambda: nn.GRU(8, 4, bidirectional=True), (5, 2, 8)),
    "RNN of relu": (lambda: nn.RNN(8, 4, nonlinearity="relu"), (5, 2, 8)),
    "LSTMCell": (lambda: nn.LSTMCell(8, 4), (2, 8)),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(8, 2, 16), (5, 2, 8)),
    "MultiheadAttention": (lambda: Threefold(nn.MultiheadAttention(8, 2)), (5, 2, 8)),
}


class Twofold(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x)


class Threefold(Twofold):
    def forward(self, x):
        return self.layer(x, x, x)


@pytest.mark.long
@pytest.mark.parametrize("name", LAYERS)
def test_a_step_of_each_layer_leaves_no_memory_behind(name: str):
    make, shape = LAYERS[name]
    assert bytes_left_by(of_layer(make(), *shape)) < NOTHING


@pytest.mark.long
@pytest.mark.parametrize("function", functions.ALL, ids=lambda function: function.__name__)
def test_a_step_of_each_style_of_function_leaves_no_memory_behind(function: type[torch.autograd.Function]):
    assert bytes_left_by(of_function(function)) < NOTHING


@pytest.mark.long
def test_a_step_whose_backward_raises_leaves_no_memory_behind():
    assert bytes_left_by(failing_backward()) < NOTHING


@pytest.mark.long
def test_a_step_of_a_training_file_leaves_no_memory_behind(tmp_path: Path):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
    batch = torch.randn(6, 4), torch.arange(6) % 3
    loss = nn.functional.cross_entropy
    torch2ort.export_training(model, batch, loss=loss, optimizer=optim.AdamW(lr=0.01)).save(tmp_path)
    session = TrainingSession(tmp_path)
    arrays = tuple(t.numpy() for t in batch)
    assert bytes_left_by(lambda: session.step(arrays)) < NOTHING
