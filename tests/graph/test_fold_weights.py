"""Values of weights alone that an export computes in advance, and those that it leaves to the session."""

from __future__ import annotations

import copy
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch2ort


class Normalized(nn.Module):
    """A layer, its batch normalization, and the operators between them."""

    def __init__(self, layer: nn.Module, norm: nn.Module, between=lambda h: h) -> None:
        super().__init__()
        self.layer, self.norm, self.between = layer, norm, between
        for name, tensor in norm.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + (0.5 if "weight" in name or "var" in name else -0.5))

    def forward(self, x):
        return self.norm(self.between(self.layer(x)))


LAYERS = {
    "convolution": (nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), torch.randn(2, 3, 6, 6)),
    "convolution with a bias": (nn.Conv1d(4, 6, 3, groups=2), nn.BatchNorm1d(6), torch.randn(2, 4, 7)),
    "transposed convolution of groups": (
        nn.ConvTranspose2d(4, 6, 2, groups=2),
        nn.BatchNorm2d(6, eps=0.1),
        torch.randn(2, 4, 3, 3),
    ),
    "linear layer": (nn.Linear(5, 4), nn.BatchNorm1d(4), torch.randn(3, 5)),
    "without scale": (nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, affine=False), torch.randn(2, 3, 4, 4)),
}


def operators(exported: torch2ort.ExportedModel) -> list[str]:
    return [node.op_type for node in exported.proto.graph.node if node.op_type != "Constant"]


def weights(exported: torch2ort.ExportedModel) -> set[str]:
    return {tensor.name for tensor in exported.proto.graph.initializer}


def in_a_plain_session(exported: torch2ort.ExportedModel, x: torch.Tensor) -> torch.Tensor:
    session = onnxruntime.InferenceSession(exported.proto.SerializeToString())
    (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return torch.from_numpy(result)


@pytest.mark.parametrize("name", LAYERS)
def test_a_normalization_is_part_of_the_layer_before_it(name: str) -> None:
    layer, norm, x = LAYERS[name]
    model = Normalized(layer, norm).eval()
    exported = torch2ort.export(model, x)
    assert "BatchNormalization" not in operators(exported)
    assert "layer.weight.folded" in weights(exported)
    assert "layer.weight" not in weights(exported)
    for result in (exported(x), in_a_plain_session(exported, x)):
        torch.testing.assert_close(result, model(x))


def test_numbers_that_are_not_finite_stay_where_they_are() -> None:
    layer, norm, x = LAYERS["convolution with a bias"]
    model = Normalized(layer, norm).eval()
    exported = torch2ort.export(model, x)
    for value in (float("nan"), float("inf"), float("-inf")):
        special = x.clone()
        special[0, 1, 3] = value
        torch.testing.assert_close(exported(special), model(special), equal_nan=True)


@pytest.mark.parametrize(
    ("model", "training"),
    [
        pytest.param(Normalized(*LAYERS["convolution"][:2]), True, id="in training"),
        pytest.param(Normalized(*LAYERS["convolution"][:2], torch.relu), False, id="behind something else"),
    ],
)
def test_a_normalization_that_is_more_than_a_product_stays(model: nn.Module, training: bool) -> None:
    x = LAYERS["convolution"][2]
    exported = torch2ort.export(model.train(training), x, training=training)
    assert "BatchNormalization" in operators(exported)
    assert "layer.weight" in weights(exported)
    torch.testing.assert_close(exported(x), copy.deepcopy(model)(x))


def test_a_result_that_is_read_twice_is_not_normalized_in_its_layer() -> None:
    class Both(Normalized):
        def forward(self, x):
            h = self.layer(x)
            return self.norm(h), h

    _, _, x = LAYERS["convolution"]
    model = Both(*LAYERS["convolution"][:2]).eval()
    exported = torch2ort.export(model, x)
    for actual, expected in zip(exported(x), model(x), strict=True):
        torch.testing.assert_close(actual, expected)


def test_a_layer_that_is_normalized_in_two_ways_has_two_weights() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 4, 1)
            self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in "ab")
            self.norms[1].running_var.fill_(4.0)

        def forward(self, x):
            return self.norms[0](self.layer(x)) + self.norms[1](self.layer(x + 1))

    x = torch.randn(2, 3, 4, 4)
    model = Shared().eval()
    exported = torch2ort.export(model, x)
    assert {"layer.weight.folded", "layer.weight.folded_2"} <= weights(exported)
    torch.testing.assert_close(in_a_plain_session(exported, x), model(x))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.net = kind(3, 4, num_layers=2, bidirectional=True)

    def forward(self, x):
        return self.net(x)[0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_weights_of_a_recurrent_net_are_laid_out_once(kind: type[nn.RNNBase]) -> None:
    x, model = torch.randn(5, 2, 3), Recurrent(kind).eval()
    exported = torch2ort.export(model, x)
    assert not {"Concat", "Slice", "Unsqueeze"} & set(operators(exported))
    names = weights(exported)
    assert "net.weight_ih_l0.folded" in names
    assert not names & model.state_dict().keys()
    for result in (exported(x), in_a_plain_session(exported, x)):
        torch.testing.assert_close(result, model(x))


def test_a_weight_that_is_read_as_it_is_is_not_there_twice() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 4)

        def forward(self, tokens):
            return self.embedding(tokens) @ self.embedding.weight[:40].t()

    tokens, model = torch.randint(50, (2, 3)), Tied().eval()
    exported = torch2ort.export(model, tokens)
    assert "embedding.weight" in weights(exported)
    assert not [name for name in weights(exported) if name.endswith(".folded")]
    torch.testing.assert_close(in_a_plain_session(exported, tokens), model(tokens))


class Rotated(nn.Module):
    """The angles of rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[-2])[:, None] * self.frequencies
        return x * angles.cos() + x.flip(-1) * angles.sin()


class LowRank(nn.Module):
    """A weight with a correction of rank two."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(6, 4))
        self.up, self.down = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.randn(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.base + self.up @ self.down / 2)


class Biased(nn.Module):
    """Attention with a bias for each pair of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2, 5, 5))
        with torch.no_grad():
            self.bias[0, 1, 2:] = -torch.inf
            self.bias[1, 3] = -torch.inf

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=self.bias)


KNOWN = {
    "a bias of attention": (Biased(), torch.randn(3, 2, 5, 4), {"Less", "Greater", "Cast", "ReduceMax"}),
    "rotary embeddings": (Rotated(), torch.randn(2, 3, 4), {"Cos", "Sin"}),
    "a correction of low rank": (LowRank(), torch.randn(3, 4), {"Add", "Div"}),
    "weight_norm": (
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)),
        torch.randn(3, 4),
        {"Div", "Sqrt"},
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_value_of_weights_alone_is_computed(name: str) -> None:
    model, x, gone = KNOWN[name]
    exported = torch2ort.export(model.eval(), x)
    assert gone.isdisjoint(node.op_type for node in exported.proto.graph.node)
    torch.testing.assert_close(exported(x), model(x))


class Positioned(nn.Module):
    """Rows of a table, whose indices are a buffer."""

    def __init__(self, positions: torch.Tensor) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.register_buffer("positions", positions)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(self.positions)


def test_rows_that_a_buffer_numbers_are_a_weight() -> None:
    model, x = Positioned(torch.tensor([5, 0, 7])).eval(), torch.randn(3, 4)
    exported = torch2ort.export(model, x)
    assert operators(exported) == ["Add"]
    torch.testing.assert_close(in_a_plain_session(exported, x), model(x))


def test_an_index_that_lies_outside_is_refused_out_of_the_cache(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    torch2ort.export(Positioned(torch.tensor([5, 0, 7])).eval(), x, cache_dir=tmp_path)
    exported = torch2ort.export(Positioned(torch.tensor([5, 0, 8])).eval(), x, cache_dir=tmp_path)
    assert exported.cache.hit
    with pytest.raises(IndexError, match="index out of range in self"):
        exported(x)


class Resized(nn.Module):
    """A parameter that is an image, resized to the size of the input."""

    def __init__(self, mode: str, first: float = 0.5) -> None:
        super().__init__()
        self.mode = mode
        self.image = nn.Parameter(torch.randn(1, 2, 3, 5))
        self.image.data[0, 0, 0, 0] = first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.interpolate(self.image, x.shape[-2:], mode=self.mode)


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_an_image_of_weights_of_its_own_size_is_not_resized(mode: str) -> None:
    model, x = Resized(mode).eval(), torch.randn(1, 2, 3, 5)
    exported = torch2ort.export(model, x)
    assert operators(exported) == ["Add"]
    torch.testing.assert_close(in_a_plain_session(exported, x), model(x), rtol=0, atol=0)


def test_an_image_of_infinite_numbers_is_resized() -> None:
    exported = torch2ort.export(Resized("bicubic", torch.inf).eval(), torch.randn(1, 2, 3, 5))
    assert operators(exported) == ["Resize", "Add"]


def test_an_image_of_another_size_is_resized() -> None:
    model, x = Resized("bicubic").eval(), torch.randn(1, 2, 6, 5)
    exported = torch2ort.export(model, x)
    assert operators(exported) == ["Resize", "Add"]
    torch.testing.assert_close(in_a_plain_session(exported, x), model(x))


def test_a_weight_without_dimensions_has_none() -> None:
    model, x = nn.PReLU(), torch.tensor(-1.5)
    result = torch2ort.export(model.eval(), x)(x)
    assert result.shape == ()
    torch.testing.assert_close(result, model(x))


class Outer(nn.Module):
    """A product of two vectors that is larger than both."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(100, 1)), nn.Parameter(torch.randn(1, 100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.one * self.other


def test_a_value_that_would_make_the_file_larger_is_computed_by_its_session() -> None:
    exported = torch2ort.export(Outer().eval(), torch.randn(100, 100))
    assert [node.op_type for node in exported.proto.graph.node] == ["Mul", "Add"]


class Padded(nn.Module):
    def __init__(self, *padding: int, value: float = 0.0, mode: str = "constant") -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3, padding=1)
        self.padding, self.value, self.mode = padding, value, mode

    def forward(self, x):
        value = {"value": self.value} if self.mode == "constant" else {}
        return self.layer(F.pad(x, self.padding, self.mode, **value))


def test_a_convolution_pads_by_itself() -> None:
    x, model = torch.randn(2, 3, 5, 5), Padded(0, 1, 2, 3).eval()
    exported = torch2ort.export(model, x)
    assert operators(exported) == ["Conv"]
    for result in (exported(x), in_a_plain_session(exported, x)):
        torch.testing.assert_close(result, model(x))


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Padded(1, 1, 1, 1, value=2.0), id="another number"),
        pytest.param(Padded(1, 1, 1, 1, mode="reflect"), id="another mode"),
        pytest.param(Padded(-1, 0, 0, 0), id="less than nothing"),
    ],
)
def test_padding_that_a_convolution_has_not_stays(model: nn.Module) -> None:
    x = torch.randn(2, 3, 5, 5)
    exported = torch2ort.export(model.eval(), x)
    assert operators(exported)[-1] == "Conv"
    assert len(operators(exported)) > 1
    torch.testing.assert_close(in_a_plain_session(exported, x), model(x))


def test_padding_before_infinite_weights_which_make_nan_of_it_stays() -> None:
    x, model = torch.randn(1, 3, 5, 5), Padded(1, 1, 1, 1).eval()
    model.layer.weight.data[0, 0, 0, 0] = float("inf")
    assert operators(torch2ort.export(model, x)) == ["Pad", "Conv"]


def test_other_weights_out_of_the_cache_are_folded_anew(tmp_path: Path) -> None:
    layer, norm, x = LAYERS["convolution"]
    for hit in (False, True):
        model = Normalized(copy.deepcopy(layer), copy.deepcopy(norm)).eval()
        exported = torch2ort.export(model, x, cache_dir=tmp_path)
        assert exported.cache.hit == hit
        torch.testing.assert_close(in_a_plain_session(exported, x), model(x))


def test_a_modules_file_has_the_weights_of_that_moment() -> None:
    layer, norm, x = LAYERS["convolution with a bias"]
    model = Normalized(copy.deepcopy(layer), copy.deepcopy(norm)).eval()
    module = torch2ort.ORTModule(model)
    for _ in range(2):
        torch.testing.assert_close(module(x), model(x))
        torch.testing.assert_close(in_a_plain_session(module.exported, x), model(x).detach())
        with torch.no_grad():
            model.layer.weight.mul_(2)


def test_a_saved_file_comes_back_as_it_was(tmp_path: Path) -> None:
    layer, norm, x = LAYERS["linear layer"]
    model = Normalized(layer, norm).eval()
    torch2ort.export(model, x).save(tmp_path / "model.onnx")
    loaded = torch2ort.load(tmp_path / "model.onnx")
    assert weights(loaded) == {"layer.weight.folded", "layer.bias.folded"}
    torch.testing.assert_close(loaded(x), model(x))
