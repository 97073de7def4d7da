"""Encoders and encoder-decoders of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

from tests.models.families.family_registry import BRANCHES, READS, READS_LABELS, TRACED, family, tokens

TINY = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "num_labels": 3,
    "pad_token_id": 0,
}
SIZES = ((2, 6), (3, 8))


def encoder(
    name: str,
    config: Any,
    model: Any,
    settings: dict[str, Any] | None = None,
    labels: Callable[[int, int], torch.Tensor] = tokens,
    sizes: Any = SIZES,
    **more: Any,
) -> None:
    options = {k: more.pop(k) for k in ("refused", "warns") if k in more}

    @family(name, **options)
    def make() -> Any:
        net = model(config(**{**(TINY if settings is None else settings), **more}))
        batches = []
        for size in sizes:
            mask = torch.ones(size, dtype=torch.int64)
            mask[0, size[1] // 2 :] = 0
            batches.append({"input_ids": tokens(*size), "attention_mask": mask, "labels": labels(*size)})
        return net, batches


def classes(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 3, (batch,))


def marks(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 3, (batch, length))


encoder("bert", hf.BertConfig, hf.BertForMaskedLM)
encoder("bert_classifier", hf.BertConfig, hf.BertForSequenceClassification, labels=classes)
encoder(
    "roberta",
    hf.RobertaConfig,
    hf.RobertaForTokenClassification,
    {**TINY, "max_position_embeddings": 40},
    labels=marks,
)
encoder(
    "distilbert",
    hf.DistilBertConfig,
    hf.DistilBertForMaskedLM,
    {
        "vocab_size": 50,
        "dim": 16,
        "hidden_dim": 32,
        "n_layers": 1,
        "n_heads": 2,
        "max_position_embeddings": 32,
    },
)
encoder("albert", hf.AlbertConfig, hf.AlbertForMaskedLM, embedding_size=8)
encoder("electra", hf.ElectraConfig, hf.ElectraForTokenClassification, embedding_size=8, labels=marks)
encoder(
    "deberta",
    hf.DebertaConfig,
    hf.DebertaForMaskedLM,
    relative_attention=True,
    pos_att_type=["c2p", "p2c"],
)
encoder(
    "deberta_v2",
    hf.DebertaV2Config,
    hf.DebertaV2ForSequenceClassification,
    relative_attention=True,
    pos_att_type=["c2p", "p2c"],
    labels=classes,
    refused=READS.format("DebertaV2ForSequenceClassification", READS_LABELS),
)
encoder(
    "deberta_v2_tokens",
    hf.DebertaV2Config,
    hf.DebertaV2ForTokenClassification,
    relative_attention=True,
    pos_att_type=["c2p", "p2c"],
    labels=marks,
)
encoder(
    "mpnet",
    hf.MPNetConfig,
    hf.MPNetForMaskedLM,
    {**TINY, "max_position_embeddings": 40, "pad_token_id": 1},
)
encoder(
    "modernbert",
    hf.ModernBertConfig,
    hf.ModernBertForMaskedLM,
    num_hidden_layers=2,
    global_attn_every_n_layers=2,
    local_attention=4,
    cls_token_id=1,
    sep_token_id=2,
    bos_token_id=1,
    eos_token_id=2,
)
encoder(
    "xlnet",
    hf.XLNetConfig,
    hf.XLNetForSequenceClassification,
    {"vocab_size": 50, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32, "num_labels": 3},
    labels=classes,
)
encoder(
    "funnel",
    hf.FunnelConfig,
    hf.FunnelForMaskedLM,
    {
        "vocab_size": 50,
        "d_model": 16,
        "n_head": 2,
        "d_head": 8,
        "d_inner": 32,
        "block_sizes": [1, 1],
        "num_decoder_layers": 1,
    },
    # The number is unused later, but the model's user can read it.
    warns="FunnelForMaskedLM: forward changes FunnelForMaskedLM.funnel.encoder.attention_structure.seq_len, "
    "and calls of the exported model do not. Return the new value from forward instead",
)
encoder(
    "convbert",
    hf.ConvBertConfig,
    hf.ConvBertForMaskedLM,
    embedding_size=16,
    conv_kernel_size=3,
    head_ratio=1,
)
encoder(
    "squeezebert",
    hf.SqueezeBertConfig,
    hf.SqueezeBertForMaskedLM,
    embedding_size=16,
    q_groups=2,
    k_groups=2,
    v_groups=2,
    post_attention_groups=1,
    intermediate_groups=2,
    output_groups=2,
)
encoder(
    "mobilebert",
    hf.MobileBertConfig,
    hf.MobileBertForMaskedLM,
    embedding_size=8,
    intra_bottleneck_size=8,
    num_feedforward_networks=1,
)
encoder(
    "longformer",
    hf.LongformerConfig,
    hf.LongformerForMaskedLM,
    attention_window=[4],
    sizes=((2, 8), (3, 12)),
    refused=READS.format("LongformerForMaskedLM", BRANCHES),
)
encoder(
    "big_bird",
    hf.BigBirdConfig,
    hf.BigBirdForMaskedLM,
    {**TINY, "max_position_embeddings": 128},
    attention_type="original_full",
)
encoder(
    "big_bird_sparse",
    hf.BigBirdConfig,
    hf.BigBirdForMaskedLM,
    {**TINY, "max_position_embeddings": 128},
    attention_type="block_sparse",
    block_size=4,
    num_random_blocks=1,
    sizes=((2, 48), (3, 64)),
)
encoder(
    "ibert",
    hf.IBertConfig,
    hf.IBertForMaskedLM,
    {**TINY, "max_position_embeddings": 40, "pad_token_id": 1},
    refused=READS.format("IBertForMaskedLM", BRANCHES),
)
encoder(
    "ibert_quantised",
    hf.IBertConfig,
    hf.IBertForMaskedLM,
    {**TINY, "max_position_embeddings": 40, "pad_token_id": 1},
    quant_mode=True,
    refused=READS.format("IBertForMaskedLM", BRANCHES),
)
encoder(
    "rembert",
    hf.RemBertConfig,
    hf.RemBertForMaskedLM,
    input_embedding_size=8,
    output_embedding_size=8,
)
encoder(
    "xlm",
    hf.XLMConfig,
    hf.XLMWithLMHeadModel,
    {
        "vocab_size": 50,
        "emb_dim": 16,
        "n_layers": 1,
        "n_heads": 2,
        "max_position_embeddings": 32,
        "pad_index": 0,
    },
)
encoder(
    "flaubert",
    hf.FlaubertConfig,
    hf.FlaubertWithLMHeadModel,
    {
        "vocab_size": 50,
        "emb_dim": 16,
        "n_layers": 1,
        "n_heads": 2,
        "max_position_embeddings": 32,
        "pad_index": 0,
    },
)
encoder("roformer", hf.RoFormerConfig, hf.RoFormerForMaskedLM)
encoder(
    "esm",
    hf.EsmConfig,
    hf.EsmForMaskedLM,
    {**TINY, "max_position_embeddings": 40, "mask_token_id": 4, "pad_token_id": 1},
)
encoder("yoso", hf.YosoConfig, hf.YosoForMaskedLM, use_expectation=True)

# --- encoder-decoders
S2S = {
    "vocab_size": 50,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
T5 = {
    "vocab_size": 50,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}


def pair(
    name: str, config: Any, model: Any, settings: dict[str, Any], *, masked: bool = False, **more: Any
) -> None:
    options = {k: more.pop(k) for k in ("refused", "warns") if k in more}

    @family(name, **options)
    def make() -> Any:
        net = model(config(**{**settings, **more}))
        batches = [{"input_ids": tokens(b, n), "labels": tokens(b, n - 2)} for b, n in SIZES]
        for batch in batches if masked else ():
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        return net, batches


pair("t5", hf.T5Config, hf.T5ForConditionalGeneration, T5)
pair("mt5", hf.MT5Config, hf.MT5ForConditionalGeneration, T5)
LONG_T5 = {**T5, "local_radius": 3, "global_block_size": 2}
pair("longt5", hf.LongT5Config, hf.LongT5ForConditionalGeneration, LONG_T5, masked=True)
pair(
    "longt5, transient global",
    hf.LongT5Config,
    hf.LongT5ForConditionalGeneration,
    LONG_T5,
    encoder_attention_type="transient-global",
    masked=True,
)
# Without a mask the model makes one, unless it is compiled.
pair(
    "longt5, no mask",
    hf.LongT5Config,
    hf.LongT5ForConditionalGeneration,
    LONG_T5,
    refused=TRACED.format("LongT5ForConditionalGeneration", "AttributeError"),
)
pair(
    "switch_transformers",
    hf.SwitchTransformersConfig,
    hf.SwitchTransformersForConditionalGeneration,
    T5,
    num_experts=4,
    expert_capacity=16,
    num_sparse_encoder_layers=1,
    num_sparse_decoder_layers=1,
    num_decoder_layers=1,
    masked=True,
    refused=TRACED.format("SwitchTransformersForConditionalGeneration", "RuntimeError"),
)
pair("bart", hf.BartConfig, hf.BartForConditionalGeneration, S2S)
pair("mbart", hf.MBartConfig, hf.MBartForConditionalGeneration, S2S)
pair("pegasus", hf.PegasusConfig, hf.PegasusForConditionalGeneration, S2S)
pair("marian", hf.MarianConfig, hf.MarianMTModel, S2S)
pair("blenderbot", hf.BlenderbotConfig, hf.BlenderbotForConditionalGeneration, S2S)
pair("m2m_100", hf.M2M100Config, hf.M2M100ForConditionalGeneration, S2S)
pair(
    "led",
    hf.LEDConfig,
    hf.LEDForConditionalGeneration,
    {
        **S2S,
        "max_encoder_position_embeddings": 32,
        "max_decoder_position_embeddings": 32,
        "attention_window": 4,
    },
    refused=READS.format("LEDForConditionalGeneration", BRANCHES),
)
pair(
    "prophetnet",
    hf.ProphetNetConfig,
    hf.ProphetNetForConditionalGeneration,
    {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
        "num_encoder_attention_heads": 2,
        "num_decoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "max_position_embeddings": 32,
        "ngram": 2,
        "num_buckets": 8,
        "relative_max_distance": 16,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    },
    refused=READS.format("ProphetNetForConditionalGeneration", BRANCHES),
)
