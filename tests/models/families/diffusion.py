"""Nets of diffusers."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from tests.models.families.family_registry import family


@family("unet_2d")
def unet_2d() -> Any:
    net = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=8,
    )
    return net, [{"sample": torch.randn(n, 3, 8, 8), "timestep": torch.arange(n)} for n in (2, 3)]


@family("unet_2d_condition")
def unet_2d_condition() -> Any:
    net = diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    return net, [
        {
            "sample": torch.randn(n, 4, 8, 8),
            "timestep": torch.arange(n),
            "encoder_hidden_states": torch.randn(n, 5, 8),
        }
        for n in (2, 3)
    ]


@family("autoencoder_kl")
def autoencoder_kl() -> Any:
    net = diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        layers_per_block=1,
    )
    return net, [{"sample": torch.randn(n, 3, 16, 16)} for n in (2, 3)]


@family("dit")
def dit() -> Any:
    net = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=3,
        out_channels=3,
        num_layers=1,
        norm_num_groups=4,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
    )
    return net, [
        {
            "hidden_states": torch.randn(n, 3, 8, 8),
            "timestep": torch.arange(n),
            "class_labels": torch.arange(n),
        }
        for n in (2, 3)
    ]


@family("transformer_2d")
def transformer_2d() -> Any:
    net = diffusers.Transformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=8,
        num_layers=1,
        norm_num_groups=4,
        cross_attention_dim=8,
    )
    return net, [
        {"hidden_states": torch.randn(n, 8, 4, 4), "encoder_hidden_states": torch.randn(n, 5, 8)}
        for n in (2, 3)
    ]


@family("sd3_transformer")
def sd3_transformer() -> Any:
    net = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=8,
        out_channels=4,
        pos_embed_max_size=8,
    )
    return net, [
        {
            "hidden_states": torch.randn(n, 4, 8, 8),
            "encoder_hidden_states": torch.randn(n, 5, 16),
            "pooled_projections": torch.randn(n, 8),
            "timestep": torch.arange(n),
        }
        for n in (2, 3)
    ]


@family("controlnet")
def controlnet() -> Any:
    net = diffusers.ControlNetModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        in_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
        norm_num_groups=4,
        conditioning_embedding_out_channels=(4, 8),
    )
    return net, [
        {
            "sample": torch.randn(n, 4, 8, 8),
            "timestep": torch.arange(n),
            "encoder_hidden_states": torch.randn(n, 5, 8),
            "controlnet_cond": torch.randn(n, 3, 16, 16),
        }
        for n in (2, 3)
    ]


@family("vq_model")
def vq_model() -> Any:
    net = diffusers.VQModel(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        num_vq_embeddings=16,
        norm_num_groups=4,
        layers_per_block=1,
    )
    return net, [{"sample": torch.randn(n, 3, 16, 16)} for n in (2, 3)]
