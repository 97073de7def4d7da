"""Vision models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

from tests.models.families.family_registry import BRANCHES, READS, family, tokens

VIT = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 3,
}


def images(
    name: str,
    config: Any,
    model: Any,
    settings: dict[str, Any],
    size: int = 32,
    labels: Callable[[int, int], Any] | None = None,
    **options: Any,
) -> None:
    @family(name, **options)
    def make() -> Any:
        batches = []
        for count in (2, 3):
            batch: dict[str, Any] = {"pixel_values": torch.randn(count, 3, size, size)}
            if labels is not None:
                batch["labels"] = labels(count, size)
            batches.append(batch)
        return model(config(**settings)), batches


def classes(count: int, size: int) -> torch.Tensor:
    return torch.randint(0, 3, (count,))


def maps(count: int, size: int) -> torch.Tensor:
    return torch.randint(0, 3, (count, size, size))


def boxes(count: int, size: int) -> list[dict[str, torch.Tensor]]:
    return [
        {"class_labels": torch.randint(0, 3, (2,)), "boxes": torch.rand(2, 4) * 0.4 + 0.2}
        for _ in range(count)
    ]


images("vit", hf.ViTConfig, hf.ViTForImageClassification, VIT, 8, classes)
images("deit", hf.DeiTConfig, hf.DeiTForImageClassification, VIT, 8, classes)
images(
    "beit",
    hf.BeitConfig,
    hf.BeitForImageClassification,
    {**VIT, "use_relative_position_bias": True},
    8,
    classes,
)
images("dinov2", hf.Dinov2Config, hf.Dinov2ForImageClassification, VIT, 8, classes)
images(
    "vit_mae",
    hf.ViTMAEConfig,
    hf.ViTMAEForPreTraining,
    {
        **VIT,
        "image_size": 16,
        "decoder_hidden_size": 16,
        "decoder_num_attention_heads": 2,
        "decoder_num_hidden_layers": 1,
        "decoder_intermediate_size": 32,
        # Normalizing small tokens with the default of 1e-12 makes gradients of 14000, so that an element of
        # 53 is inexact: 52.97932 in float64, 52.98419 in eager PyTorch's float32, 52.97655 in ONNX Runtime's.
        "layer_norm_eps": 1e-3,
    },
    16,
)
images(
    "swin",
    hf.SwinConfig,
    hf.SwinForImageClassification,
    {
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": 8,
        "depths": [2, 1],
        "num_heads": [1, 2],
        "window_size": 4,
        "num_labels": 3,
    },
    16,
    classes,
)
images(
    "swinv2",
    hf.Swinv2Config,
    hf.Swinv2ForImageClassification,
    {
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": 8,
        "depths": [2, 1],
        "num_heads": [1, 2],
        "window_size": 4,
        "num_labels": 3,
    },
    16,
    classes,
)
images(
    "convnext",
    hf.ConvNextConfig,
    hf.ConvNextForImageClassification,
    {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 3},
    32,
    classes,
)
images(
    "convnextv2",
    hf.ConvNextV2Config,
    hf.ConvNextV2ForImageClassification,
    {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 3},
    32,
    classes,
)
images(
    "resnet",
    hf.ResNetConfig,
    hf.ResNetForImageClassification,
    {
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "layer_type": "bottleneck",
        "num_labels": 3,
    },
    32,
    classes,
)
images(
    "regnet",
    hf.RegNetConfig,
    hf.RegNetForImageClassification,
    {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8, "num_labels": 3},
    32,
    classes,
)
images(
    "segformer",
    hf.SegformerConfig,
    hf.SegformerForSemanticSegmentation,
    {
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "sr_ratios": [2, 1],
        "hidden_sizes": [8, 16],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
        "decoder_hidden_size": 8,
        "num_labels": 3,
    },
    32,
    maps,
)
images(
    "pvt",
    hf.PvtConfig,
    hf.PvtForImageClassification,
    {
        "image_size": 32,
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "sequence_reduction_ratios": [2, 1],
        "hidden_sizes": [8, 16],
        "patch_sizes": [4, 2],
        "strides": [4, 2],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
        "num_labels": 3,
    },
    32,
    classes,
)
images(
    "poolformer",
    hf.PoolFormerConfig,
    hf.PoolFormerForImageClassification,
    {
        "depths": [1, 1],
        "hidden_sizes": [8, 16],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "padding": [2, 1],
        "num_encoder_blocks": 2,
        "num_labels": 3,
    },
    32,
    classes,
)
images(
    "focalnet",
    hf.FocalNetConfig,
    hf.FocalNetForImageClassification,
    {
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "focal_levels": [1, 1],
        "focal_windows": [3, 3],
        "num_labels": 3,
    },
    16,
    classes,
)
images(
    "hiera",
    hf.HieraConfig,
    hf.HieraForImageClassification,
    {
        "image_size": [32, 32],
        "patch_size": [7, 7],
        "patch_stride": [4, 4],
        "patch_padding": [3, 3],
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [1, 2],
        "num_query_pool": 1,
        "masked_unit_size": [4, 4],
        "masked_unit_attention": [True, False],
        "query_stride": [2, 2],
        "num_labels": 3,
    },
    32,
    classes,
)
images(
    "dpt",
    hf.DPTConfig,
    hf.DPTForDepthEstimation,
    {
        **VIT,
        "image_size": 16,
        "num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [8, 8, 8, 8],
        "fusion_hidden_size": 8,
        "readout_type": "project",
        "is_hybrid": False,
    },
    16,
)


@family("detr", refused=READS.format("DetrForObjectDetection", BRANCHES))
def detr() -> Any:
    backbone = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = hf.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone_config=backbone,
        num_queries=4,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_labels=3,
    )
    return hf.DetrForObjectDetection(config), [{"pixel_values": torch.randn(n, 3, 32, 32)} for n in (2, 3)]


CLIP_TEXT = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "projection_dim": 16,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


def both(name: str, config: Any, model: Any, settings: dict[str, Any], **options: Any) -> None:
    @family(name, **options)
    def make() -> Any:
        vision = {k: v for k, v in VIT.items() if k != "num_labels"}
        net = model(config(text_config=CLIP_TEXT, vision_config=vision, **settings))
        return net, [
            {"input_ids": tokens(n, 6), "pixel_values": torch.randn(n, 3, 8, 8), "return_loss": True}
            for n in (2, 3)
        ]


both("clip", hf.CLIPConfig, hf.CLIPModel, {"projection_dim": 16})
both("siglip", hf.SiglipConfig, hf.SiglipModel, {})
both("blip", hf.BlipConfig, hf.BlipModel, {"projection_dim": 16})


@family("vision_encoder_decoder")
def vision_encoder_decoder() -> Any:
    text = hf.GPT2Config(
        vocab_size=50,
        n_positions=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        add_cross_attention=True,
        is_decoder=True,
    )
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(hf.ViTConfig(**VIT), text)
    config.decoder_start_token_id, config.pad_token_id = 0, 0
    net = hf.VisionEncoderDecoderModel(config)
    return net, [{"pixel_values": torch.randn(n, 3, 8, 8), "labels": tokens(n, 5)} for n in (2, 3)]


@family("llava")
def llava() -> Any:
    text = hf.LlamaConfig(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    vision = hf.CLIPVisionConfig(**{k: v for k, v in VIT.items() if k != "num_labels"})
    net = hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=55, vision_feature_layer=-1)
    )
    batches = []
    for n in (2, 3):
        ids = tokens(n, 9)
        ids[:, 2:6] = 55
        batches.append({"input_ids": ids, "pixel_values": torch.randn(n, 3, 8, 8), "labels": ids})
    return net, batches
