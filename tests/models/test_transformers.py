"""Transformers' models train on ONNX Runtime as in eager PyTorch; random weights, tiny configurations."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.support.comparison import assert_trains_like_eager
from tests.support.sweeps import sample_cases

OPTIMIZERS = ((torch.optim.SGD, 0.05), (torch.optim.AdamW, 1e-3))
# Of the four, `make test` runs SGD without dropout and AdamW with it.
TRAININGS = pytest.mark.parametrize(
    ("dropout", "optimizer", "lr"),
    sample_cases([(dropout, *optimizer) for dropout in (0.0, 0.1) for optimizer in OPTIMIZERS], 3),
)
TINY = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)


def bert(**settings) -> torch.nn.Module:
    config = transformers.BertConfig(**TINY, max_position_embeddings=32, num_labels=3, **settings)
    return transformers.BertForSequenceClassification(config)


def gpt2(**settings) -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2, use_cache=False, **settings
    )
    return transformers.GPT2LMHeadModel(config)


def bert_batch(batch: int, length: int) -> dict:
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, length // 2 :] = 0
    return {
        "input_ids": torch.randint(0, 50, (batch, length)),
        "attention_mask": mask,
        "labels": torch.randint(0, 3, (batch,)),
    }


def gpt2_batch(batch: int, length: int) -> dict:
    ids = torch.randint(0, 50, (batch, length))
    return {"input_ids": ids, "labels": ids}


@TRAININGS
def test_bert_for_sequence_classification(optimizer, lr, dropout):
    model = bert(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout).train()
    assert_trains_like_eager(model, [bert_batch(4, 8)], optimizer, lr=lr)


@TRAININGS
def test_gpt2_with_language_model_head(optimizer, lr, dropout):
    model = gpt2(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout).train()
    assert_trains_like_eager(model, [gpt2_batch(2, 8)], optimizer, lr=lr)


def test_bert_with_varying_batch_and_length():
    model = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
    assert_trains_like_eager(model, [bert_batch(4, 8), bert_batch(3, 6), bert_batch(2, 10)], steps=6)
