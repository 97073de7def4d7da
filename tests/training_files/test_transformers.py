"""Transformers of Hugging Face, trained by their files and by eager PyTorch."""

from __future__ import annotations

import pytest
import torch

from tests.training_files.eager_comparison import assert_trains_alike
from torch2ort import optim

pytestmark = pytest.mark.long

transformers = pytest.importorskip("transformers", reason="comes with the extra test")


def test_a_tiny_bert_that_returns_its_loss(tmp_path):
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.BertForSequenceClassification(config)

    def batches(step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        mask = torch.ones(3, 6, dtype=torch.int64)
        mask[1, 4:] = 0
        return {
            "input_ids": torch.randint(0, 20, (3, 6), generator=generator),
            "attention_mask": mask,
            "labels": torch.randint(0, 2, (3,), generator=generator),
        }

    assert_trains_alike(
        model,
        batches,
        tmp_path,
        optimizer=optim.AdamW(lr=1e-3, max_grad_norm=1.0),
        eager_optimizer=lambda p: Clipped(p, lr=1e-3),
    )


class Clipped(torch.optim.AdamW):
    """Clips the norm of all gradients first."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


class Lora(torch.nn.Module):
    """A layer with a trained addition of low rank."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer
        rows, columns = layer.weight.shape
        self.lora_a = torch.nn.Parameter(0.1 * torch.randn(rows, 2))
        self.lora_b = torch.nn.Parameter(torch.zeros(2, columns))

    def forward(self, x):
        return self.layer(x) + x @ self.lora_a @ self.lora_b


def test_adapters_of_a_tiny_gpt2_while_all_else_is_constant(tmp_path):
    config = transformers.GPT2Config(
        vocab_size=20,
        n_positions=8,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    for block in model.transformer.h:
        block.attn.c_attn = Lora(block.attn.c_attn)

    def batches(step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 20, (2, 6), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}

    session = assert_trains_alike(
        model,
        batches,
        tmp_path,
        optimizer=optim.AdamW(lr=1e-2),
        eager_optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
        trainable="*lora*",
    )
    assert set(session.description.parameters) == {
        f"transformer.h.{i}.attn.c_attn.lora_{name}" for i in range(2) for name in "ab"
    }
