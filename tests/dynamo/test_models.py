"""Transformers' models through torch.compile; random weights, tiny configurations."""

from __future__ import annotations

import pytest
import torch

import torch2ort
from tests.support import comparison

transformers = pytest.importorskip(
    "transformers", reason="transformers is installed beside one onnxruntime alone"
)

TINY = dict(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    model.compile(backend="torch2ort")
    return model


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(torch2ort, "ORTModule", compiled)


def test_bert_trains_like_eager() -> None:
    settings = transformers.BertConfig(**TINY, max_position_embeddings=8, num_labels=3)
    batch = {"input_ids": torch.randint(0, 32, (2, 6)), "labels": torch.randint(0, 3, (2,))}
    model = transformers.BertForSequenceClassification(settings).train()
    comparison.assert_trains_like_eager(model, [batch], torch.optim.AdamW, lr=1e-3, steps=3)
    assert torch2ort.compile_report().breaks == ()


@pytest.mark.long
def test_a_compiled_decoder_generates_what_eager_does() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, num_key_value_heads=1)).eval()
    ids = {"input_ids": torch.randint(0, 32, (2, 5)), "attention_mask": torch.ones(2, 5, dtype=torch.int64)}
    wanted = model.generate(**ids, max_new_tokens=6, do_sample=False)
    model.forward = torch.compile(model.forward, backend="torch2ort", dynamic=True)
    assert torch.equal(model.generate(**ids, max_new_tokens=6, do_sample=False), wanted)
    assert len(torch2ort.compile_report().graphs) <= 3
