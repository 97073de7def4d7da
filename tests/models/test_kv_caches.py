"""Decoders accept and return the caches of transformers as in eager PyTorch."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import transformers as hf

import torch2ort

TINY = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def llama() -> hf.LlamaForCausalLM:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**TINY)).eval()


def tokens(length: int) -> torch.Tensor:
    return torch.randint(3, 50, (2, length))


def assert_same_cache(actual: hf.Cache, expected: hf.Cache) -> None:
    assert type(actual) is type(expected)
    assert actual.get_seq_length() == expected.get_seq_length()
    for a, e in zip(actual.layers, expected.layers, strict=True):
        assert vars(a).keys() == vars(e).keys()
        torch.testing.assert_close((a.keys, a.values), (e.keys, e.values), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_decoder_returns_its_cache_by_default(llama):
    module, ids = torch2ort.ORTModule(llama), tokens(5)
    assert_same_cache(module(ids).past_key_values, llama(ids).past_key_values)


@torch.no_grad()
def test_steps_of_generation_fill_the_cache_that_is_passed(llama):
    module = torch2ort.ORTModule(llama)
    caches = [hf.DynamicCache(), hf.DynamicCache()]
    for length in (4, 1, 1):
        ids = tokens(length)
        expected, actual = (m(ids, past_key_values=c) for m, c in zip((llama, module), caches, strict=True))
        torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-4, atol=1e-5)
        assert actual.past_key_values is caches[1]
        assert_same_cache(*reversed(caches))


@torch.no_grad()
def test_an_exported_decoder_fills_the_cache_that_is_passed(llama, tmp_path):
    cache = llama(tokens(4)).past_key_values
    step = {"input_ids": tokens(1), "past_key_values": cache}
    torch2ort.export(llama, copy.deepcopy(step)).save(tmp_path / "decoder.onnx")
    given = copy.deepcopy(step)
    actual = torch2ort.load(tmp_path / "decoder.onnx")(**given)
    assert actual.past_key_values is given["past_key_values"]
    assert_same_cache(actual.past_key_values, llama(**step).past_key_values)


@torch.no_grad()
def test_a_cache_of_fixed_length_is_written_in_place(llama):
    module = torch2ort.ORTModule(llama)
    caches = [hf.StaticCache(config=llama.config, max_cache_len=8) for _ in range(2)]
    for length in (4, 1):
        ids = tokens(length)
        for model, cache in zip((llama, module), caches, strict=True):
            model(ids, past_key_values=cache)
        assert_same_cache(*reversed(caches))


def test_the_cache_of_an_encoder_decoder():
    config = hf.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = hf.T5ForConditionalGeneration(config).eval()
    call = {"input_ids": tokens(6), "decoder_input_ids": tokens(4)}
    with torch.no_grad():
        actual, expected = (m(**call).past_key_values for m in (torch2ort.export(model, call), model))
    assert_same_cache(actual.self_attention_cache, expected.self_attention_cache)
    assert_same_cache(actual.cross_attention_cache, expected.cross_attention_cache)
    assert actual.is_updated == expected.is_updated


def test_a_cache_that_is_filled_and_not_returned_is_refused(llama):
    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = llama

        def forward(self, ids, cache):
            return self.decoder(ids, past_key_values=cache).logits

    expected = (
        "forward changes the transformers.cache_utils.DynamicCache that it is given and does not return "
        "it, and a graph returns only what forward returns. Return it, or call the model without a "
        "cache (use_cache=False)"
    )
    cache = llama(tokens(4)).past_key_values
    with pytest.raises(torch2ort.ExportError, match=f"^{re.escape(expected)}$"):
        torch2ort.export(Logits(), (tokens(1), cache))
