"""Backward recomputes cheap activations from the saved ones, with eager PyTorch's gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch2ort
from tests.support.comparison import assert_trains_like_eager
from tests.support.two_layer_model import WIDTH, Keep, TwoLayerModel
from torch2ort.differentiate.split import Split
from torch2ort.training import plan_builder

LENGTH = 32
X = torch.randn(8, LENGTH, 6)
SIZE = 8 * LENGTH * WIDTH * 4


def written_out(h):
    return 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h.pow(3))))


def attention(m, h):
    q, k = h.view(8, LENGTH, 8, 16).transpose(1, 2), (h * 2).view(8, LENGTH, 8, 16).transpose(1, 2)
    probabilities = (q @ k.transpose(-1, -2) / 4).softmax(-1)
    return m.after((probabilities @ q).transpose(1, 2).reshape(8, LENGTH, WIDTH))


def chain(h):
    for _ in range(12):
        h = torch.sin(h)
    return h


def kept_bytes(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, share: float | None = 1.0, **options
) -> int:
    """Bytes of the activations that the first step of ``model`` saves.

    Args:
        model: a model whose input is ``X``.
        monkeypatch: wraps the function that splits the step.
        share: share of the step's time that may be spent on recomputation; ``None`` for the options' own.
        options: options of the module.
    """
    splits = []

    class Watched(Split):
        def __init__(self, joint, **settings) -> None:
            super().__init__(joint, **settings if share is None else {**settings, "share": share})
            splits.append(self)

    monkeypatch.setattr(plan_builder, "Split", Watched)
    torch2ort.ORTModule(model, options=torch2ort.Options(**options))(X)
    values = [node.meta["val"] for split in splits for node in split.kept if node.op != "placeholder"]
    return sum(v.numel() * v.element_size() for v in values if v.numel() * v.element_size() >= SIZE // 8)


# Bytes that are saved, in units of the bytes of the layer's result.
CASES = {
    "gelu": (TwoLayerModel(lambda m, h: m.after(F.gelu(h))), 1),
    "silu": (TwoLayerModel(lambda m, h: m.after(F.silu(h))), 1),
    "an activation that the model writes out": (TwoLayerModel(lambda m, h: m.after(written_out(h))), 1),
    "a gate": (TwoLayerModel(lambda m, h: m.after(F.silu(h) * torch.tanh(h))), 1),
    "layer norm": (TwoLayerModel(lambda m, h: m.after(m.norm(h)), nn.LayerNorm(WIDTH)), 1),
    "one behind the other": (TwoLayerModel(lambda m, h: m.after(F.gelu(m.norm(h))), nn.LayerNorm(WIDTH)), 1),
    # Queries, keys, values and the context, not the probabilities.
    "attention": (TwoLayerModel(attention), 4),
    # The derivative of tanh reads its result, and nothing is saved that it could be computed from.
    "nothing to compute it from": (TwoLayerModel(lambda m, h: m.after(torch.tanh(h))), 1),
    # The first eight steps are recomputed from the layer's result, the others from the ninth.
    "a long chain": (TwoLayerModel(lambda m, h: m.after(chain(h))), 2),
    "of a Function that keeps it": (
        TwoLayerModel(lambda m, h: m.after(g := F.gelu(h)) + Keep.apply(g)[..., :5]),
        2,
    ),
    "returned": (TwoLayerModel(lambda m, h: (m.after(g := F.gelu(h)), g)), 2),
}


@pytest.mark.parametrize(("model", "units"), CASES.values(), ids=CASES)
def test_only_what_is_dear_is_kept(model, units, monkeypatch):
    assert round(kept_bytes(model, monkeypatch) / SIZE) == units


@pytest.mark.parametrize("model", [model for model, _ in CASES.values()], ids=CASES)
def test_gradients_are_eagers(model):
    assert_trains_like_eager(model, [(X,), (X + 1,)], steps=3)


def test_nothing_is_recomputed_without_time_for_it(monkeypatch):
    model = TwoLayerModel(lambda m, h: m.after(F.gelu(m.norm(h))), nn.LayerNorm(WIDTH))
    # The layer's result, the normalised one, and its GELU.
    assert round(kept_bytes(model, monkeypatch, 0.0) / SIZE) == 3


def test_what_frees_most_memory_for_its_time_is_recomputed_first(monkeypatch):
    # Of these, a normalisation takes less time than a GELU.
    model = TwoLayerModel(lambda m, h: m.after(F.gelu(h)) + m.after(m.norm(h.exp())), nn.LayerNorm(WIDTH))
    kept = [kept_bytes(model, monkeypatch, share / 100) / SIZE for share in range(0, 101, 4)]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) > 2


def wide() -> nn.Module:
    """A net whose matrix products take a hundred times as long as a GELU."""
    layers = TwoLayerModel(lambda m, h: m.after(F.gelu(h)))
    layers.before, layers.after = (
        nn.Linear(6, WIDTH),
        nn.Sequential(nn.Linear(WIDTH, 4096), nn.Linear(4096, 5)),
    )
    return layers


def test_a_gelu_is_recomputed_where_that_is_a_hundredth_of_the_step(monkeypatch):
    inner = SIZE // WIDTH * 4096
    assert round((kept_bytes(wide(), monkeypatch, None) - inner) / SIZE) == 1


def test_the_fastest_mode_recomputes_nothing(monkeypatch):
    inner = SIZE // WIDTH * 4096
    kept = kept_bytes(wide(), monkeypatch, None, mode="max", fuse=False, autotune=False)
    assert round((kept - inner) / SIZE) == 2


def test_small_values_are_kept(monkeypatch):
    model = TwoLayerModel(lambda m, h: m.after(F.gelu(h[:1, :4])))
    assert kept_bytes(model, monkeypatch) < SIZE * 2


def test_a_write_to_an_output_that_eager_saves_is_refused_though_it_is_recomputed():
    model = torch2ort.ORTModule(TwoLayerModel(lambda m, h: (g := torch.exp(h), m.after(torch.tanh(h) + g))))
    output, _ = model(X)
    output.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
