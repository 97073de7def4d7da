"""Decoders of transformers, with the cache that they return by default."""

from __future__ import annotations

from typing import Any

import transformers as hf

from tests.models.families.family_registry import family, tokens

SIZES = ((2, 6), (3, 8))
TINY = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**TINY, "num_key_value_heads": 1, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def decoder(name: str, config: Any, model: Any, settings: dict[str, Any] | None = None, **more: Any) -> None:
    options = {k: more.pop(k) for k in ("refused",) if k in more}

    @family(name, **options)
    def make() -> Any:
        net = model(config(**{**(GROUPED if settings is None else settings), **more}))
        return net, [{"input_ids": (ids := tokens(*size)), "labels": ids} for size in SIZES]


GPT2 = {"vocab_size": 50, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
decoder("llama", hf.LlamaConfig, hf.LlamaForCausalLM)
decoder("qwen2", hf.Qwen2Config, hf.Qwen2ForCausalLM)
decoder("qwen3", hf.Qwen3Config, hf.Qwen3ForCausalLM)
decoder("gemma", hf.GemmaConfig, hf.GemmaForCausalLM)
decoder("phi", hf.PhiConfig, hf.PhiForCausalLM)
decoder("phi3", hf.Phi3Config, hf.Phi3ForCausalLM)
decoder("gpt2", hf.GPT2Config, hf.GPT2LMHeadModel, GPT2)
decoder(
    "gpt_neo",
    hf.GPTNeoConfig,
    hf.GPTNeoForCausalLM,
    {
        "vocab_size": 50,
        "max_position_embeddings": 32,
        "hidden_size": 16,
        "num_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "num_heads": 2,
        "window_size": 4,
    },
)
decoder("gpt_neox", hf.GPTNeoXConfig, hf.GPTNeoXForCausalLM, TINY)
decoder("gptj", hf.GPTJConfig, hf.GPTJForCausalLM, {**GPT2, "rotary_dim": 4})
decoder("gpt_bigcode", hf.GPTBigCodeConfig, hf.GPTBigCodeForCausalLM, GPT2)
decoder(
    "codegen",
    hf.CodeGenConfig,
    hf.CodeGenForCausalLM,
    {**GPT2, "rotary_dim": 4, "n_head": 4, "n_embd": 32},
)
decoder(
    "opt",
    hf.OPTConfig,
    hf.OPTForCausalLM,
    {**TINY, "ffn_dim": 32, "word_embed_proj_dim": 16, "pad_token_id": 1},
)
decoder(
    "bloom",
    hf.BloomConfig,
    hf.BloomForCausalLM,
    {"vocab_size": 50, "hidden_size": 16, "n_layer": 1, "n_head": 2},
)
decoder("falcon", hf.FalconConfig, hf.FalconForCausalLM, TINY)
decoder(
    "mpt",
    hf.MptConfig,
    hf.MptForCausalLM,
    {"vocab_size": 50, "d_model": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 32},
)
decoder("stablelm", hf.StableLmConfig, hf.StableLmForCausalLM)
decoder("starcoder2", hf.Starcoder2Config, hf.Starcoder2ForCausalLM)
decoder("cohere", hf.CohereConfig, hf.CohereForCausalLM)
decoder("olmo", hf.OlmoConfig, hf.OlmoForCausalLM)
decoder("olmo2", hf.Olmo2Config, hf.Olmo2ForCausalLM)
decoder("granite", hf.GraniteConfig, hf.GraniteForCausalLM)
decoder("glm", hf.GlmConfig, hf.GlmForCausalLM)
decoder("persimmon", hf.PersimmonConfig, hf.PersimmonForCausalLM, TINY)
decoder("biogpt", hf.BioGptConfig, hf.BioGptForCausalLM, {**TINY, "pad_token_id": 1})
decoder(
    "xglm",
    hf.XGLMConfig,
    hf.XGLMForCausalLM,
    {
        "vocab_size": 50,
        "d_model": 16,
        "ffn_dim": 32,
        "num_layers": 1,
        "attention_heads": 2,
        "max_position_embeddings": 32,
    },
)
decoder(
    "ctrl",
    hf.CTRLConfig,
    hf.CTRLLMHeadModel,
    {"vocab_size": 50, "n_positions": 32, "n_embd": 16, "dff": 32, "n_layer": 1, "n_head": 2},
)
decoder("openai_gpt", hf.OpenAIGPTConfig, hf.OpenAIGPTLMHeadModel, GPT2)
decoder("smollm3", hf.SmolLM3Config, hf.SmolLM3ForCausalLM)
decoder("nemotron", hf.NemotronConfig, hf.NemotronForCausalLM)

# --- mixtures of experts
decoder("mixtral", hf.MixtralConfig, hf.MixtralForCausalLM, num_local_experts=4, output_router_logits=True)
decoder(
    "qwen2_moe",
    hf.Qwen2MoeConfig,
    hf.Qwen2MoeForCausalLM,
    **EXPERTS,
    shared_expert_intermediate_size=8,
)
decoder("qwen3_moe", hf.Qwen3MoeConfig, hf.Qwen3MoeForCausalLM, **EXPERTS)
decoder("olmoe", hf.OlmoeConfig, hf.OlmoeForCausalLM, **EXPERTS)
decoder(
    "jetmoe",
    hf.JetMoeConfig,
    hf.JetMoeForCausalLM,
    {k: v for k, v in TINY.items() if k != "num_attention_heads"},
    num_key_value_heads=1,
    kv_channels=8,
    num_local_experts=4,
)
decoder("granitemoe", hf.GraniteMoeConfig, hf.GraniteMoeForCausalLM, num_local_experts=4)
decoder(
    "deepseek_v3",
    hf.DeepseekV3Config,
    hf.DeepseekV3ForCausalLM,
    {**TINY, "num_key_value_heads": 2},
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    first_k_dense_replace=0,
    n_group=1,
    topk_group=1,
    kv_lora_rank=8,
    q_lora_rank=8,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
)

# --- state space, linear attention and mixtures of them with attention
MAMBA = {
    "vocab_size": 50,
    "hidden_size": 16,
    "state_size": 4,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
decoder("mamba", hf.MambaConfig, hf.MambaForCausalLM, MAMBA)
decoder(
    "mamba2",
    hf.Mamba2Config,
    hf.Mamba2ForCausalLM,
    {**MAMBA, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
)
decoder("falcon_mamba", hf.FalconMambaConfig, hf.FalconMambaForCausalLM, MAMBA)
decoder(
    "jamba",
    hf.JambaConfig,
    hf.JambaForCausalLM,
    {
        **TINY,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
)
decoder(
    "lfm2",
    hf.Lfm2Config,
    hf.Lfm2ForCausalLM,
    {**TINY, "num_key_value_heads": 1, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
)
