"""Small models that the tests of training loops share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torch2ort
from tests.support.functions import Affine, Square


class Gate(torch.autograd.Function):
    """SiLU, with a backward of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s + x * s * (1 - s))


class Gated(torch.nn.Module):
    """An activation by the Function :class:`Gate`."""

    def forward(self, x):
        return Gate.apply(x)


class Layer(torch.nn.Module):
    """Its Functions save weights for their backward; one weight is its own, others belong to a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return Square.apply(self.linear(x)) * self.scale + Affine.apply(x, self.scale)


class Classifier(torch.nn.Module):
    """Two layers around :class:`Gate`, with dropout; returns logits (rows, 2)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, width)
        self.dropout = torch.nn.Dropout(0.2)
        self.last = torch.nn.Linear(width, 2)

    def forward(self, x):
        return self.last(self.dropout(Gate.apply(self.first(x))))


def rows(count: int = 48) -> torch.utils.data.TensorDataset:
    """Numbers (count, 4) and labels (count,), always the same."""
    generator = torch.Generator().manual_seed(2)
    return torch.utils.data.TensorDataset(torch.randn(count, 4, generator=generator), torch.arange(count) % 2)


def decoder(seed: int = 1) -> torch.nn.Module:
    """A Llama of one layer, whose feed-forward calls :class:`Gate`."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp.act_fn = Gated()
    return model


def token_rows(count: int = 40, length: int = 8) -> list[dict[str, torch.Tensor]]:
    """Rows of tokens of a decoder with labels, always the same."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, 32, (count, length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def on_onnx_runtime(model: torch.nn.Module, cache: Path, **options) -> torch2ort.ORTModule:
    """``model`` on ONNX Runtime, with a cache that shares exports between tests."""
    return torch2ort.ORTModule(model, options=torch2ort.Options(cache_dir=cache, **options))


def ran_on_onnx_runtime(output: torch.Tensor) -> bool:
    """Return True if ``output`` was computed from an ORTModule's output."""
    waiting, seen = [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if type(node).__name__ == "BoundaryBackward":
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False
