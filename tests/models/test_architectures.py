"""One training step of many architectures, in two input sizes, equals eager PyTorch's."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.support.comparison import assert_trains_like_eager

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(2, 50, (batch, length))


def llama():
    config = transformers.LlamaConfig(
        **SMALL, num_key_value_heads=1, vocab_size=50, max_position_embeddings=32, use_cache=False
    )
    batches = [{"input_ids": (ids := tokens(*size)), "labels": ids} for size in ((2, 6), (3, 8))]
    return transformers.LlamaForCausalLM(config), batches


def t5():
    config = transformers.T5Config(
        vocab_size=50,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        use_cache=False,
        decoder_start_token_id=0,
    )
    batches = [{"input_ids": tokens(2, n), "labels": tokens(2, n - 1)} for n in (6, 8)]
    return transformers.T5ForConditionalGeneration(config), batches


def vit():
    config = transformers.ViTConfig(**SMALL, image_size=8, patch_size=4, num_labels=3)
    batches = [{"pixel_values": torch.randn(n, 3, 8, 8), "labels": torch.randint(0, 3, (n,))} for n in (2, 3)]
    return transformers.ViTForImageClassification(config), batches


def resnet():
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    batches = [
        {"pixel_values": torch.randn(n, 3, 32, 32), "labels": torch.randint(0, 3, (n,))} for n in (2, 4)
    ]
    return transformers.ResNetForImageClassification(config), batches


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(6, 8, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2)
        self.head = torch.nn.Linear(16, 3)

    def forward(self, x):
        hidden, (last, _) = self.lstm(x)
        return self.head(hidden[:, -1]), last


def lstm():
    return Recurrent(), [(torch.randn(2, 5, 6),), (torch.randn(3, 7, 6),)]


def encoder():
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), [
        (torch.randn(2, 5, 16),),
        (torch.randn(3, 7, 16),),
    ]


@pytest.mark.parametrize(
    "make",
    [vit, resnet, lstm, *(pytest.param(make, marks=pytest.mark.long) for make in (llama, t5, encoder))],
)
def test_architecture(make):
    model, batches = make()
    # Without an update in between: a difference of 1e-7 in a weight can turn a ReLU or a maximum over.
    assert_trains_like_eager(model.train(), batches, lr=0.0, steps=2)
