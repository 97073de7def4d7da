"""The transformers that the benchmarks train: random weights, no dropout, so that all engines must agree."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

LENGTH, HIDDEN, LAYERS, VOCABULARY = 128, 256, 4, 1000


def bert() -> nn.Module:
    """A BERT that classifies sequences."""
    torch.manual_seed(1)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            intermediate_size=4 * HIDDEN,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ).train()


def gpt2() -> nn.Module:
    """A GPT-2 that predicts the next token."""
    torch.manual_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=HIDDEN,
            n_layer=LAYERS,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )
    model.loss_type = "ForCausalLM"
    return model.train()


MODELS = {"BERT": bert, "GPT-2": gpt2}


def batch(name: str, size: int) -> dict[str, Tensor]:
    """Arguments of the model of that name: tokens of shape ``(size, LENGTH)``, and labels."""
    tokens = torch.randint(VOCABULARY, (size, LENGTH))
    labels = torch.randint(2, (size,)) if name == "BERT" else tokens
    return {"input_ids": tokens, "labels": labels}
