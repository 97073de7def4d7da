"""Mixtures of experts, whose product in groups is an operator of transformers."""

from __future__ import annotations

import torch
import transformers as hf

import torch2ort


@torch.no_grad()
def test_a_saved_mixture_of_experts_equals_eager(tmp_path):
    config = hf.MixtralConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
    )
    model, ids = hf.MixtralForCausalLM(config).eval(), torch.randint(3, 50, (2, 6))
    torch2ort.export(model, ids).save(tmp_path / "experts.onnx")
    loaded = torch2ort.load(tmp_path / "experts.onnx")
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
