"""Forty small models for files: encoders, decoders, vision, audio, recurrent nets, heads of detection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

_TEXT = {"vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_IMAGE = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


class Logits(nn.Module):
    """A model of transformers, called without labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, or the last hidden state."""
        found = self.model(x)
        return found.last_hidden_state if getattr(found, "logits", None) is None else found.logits


class First(nn.Module):
    """The first output of a layer with several."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Return the first output."""
        return self.layer(x)[0]


class UNet(nn.Module):
    """Two steps down and up, with a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(16, 16, 3, padding=1), nn.SiLU())
        self.last = nn.Conv2d(32, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return an image of the same size."""
        h = self.first(x)
        up = nn.functional.interpolate(self.deep(h), scale_factor=2)
        return self.last(torch.cat([h, up], 1))


def _tokens() -> Tensor:
    return torch.randint(1000, (2, 16))


def _small_image() -> Tensor:
    return torch.randn(1, 3, 32, 32)


def _image() -> Tensor:
    return torch.randn(1, 3, 64, 64)


def _mobilenet() -> nn.Module:
    return tf.MobileNetV2ForImageClassification(tf.MobileNetV2Config(num_labels=10))


def _resnet() -> nn.Module:
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32, 64, 128], "depths": [2, 2, 2, 2]}
    return tf.ResNetForImageClassification(tf.ResNetConfig(**sizes, layer_type="basic", num_labels=10))


class Pyramid(nn.Module):
    """A detection head over two sizes of an image: boxes and classes at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU())
        self.lateral = nn.Conv2d(16, 32, 1)
        self.boxes, self.classes = nn.Conv2d(32, 4, 3, padding=1), nn.Conv2d(32, 10, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return boxes and classes at all positions."""
        fine = self.first(x)
        coarse = self.second(fine)
        fine = self.lateral(fine) + nn.functional.interpolate(coarse, scale_factor=2)
        levels = [torch.cat([self.boxes(f).exp(), self.classes(f).sigmoid()], 1) for f in (fine, coarse)]
        return torch.cat([level.flatten(2) for level in levels], 2).transpose(1, 2)


class Separated(nn.Module):
    """Masks of a spectrum by a bidirectional recurrent net, as for speech."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net = nn.BatchNorm1d(40), nn.GRU(40, 32, 2, batch_first=True, bidirectional=True)
        self.mask = nn.Linear(64, 40)

    def forward(self, x: Tensor) -> Tensor:
        """Return the masked spectrum."""
        return x * self.mask(self.net(self.norm(x.transpose(1, 2)).transpose(1, 2))[0]).sigmoid()


def _hugging_face(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """A model of transformers by its names."""
    return lambda: Logits(getattr(tf, model)(getattr(tf, config)(**settings)))


_WIDE = {**_TEXT, "intermediate_size": 128}
_DECODER = {**_WIDE, "num_key_value_heads": 2, "use_cache": False}
_GPT2 = {"vocab_size": 1000, "n_embd": 64, "n_layer": 2, "n_head": 4, "use_cache": False}
_SPEECH = {
    **{"vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 128, "conv_dim": [32, 32], "conv_kernel": [10, 3], "conv_stride": [5, 2]},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
}


# Name -> the model, and its input.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "MLP": (
        lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10)),
        lambda: torch.randn(4, 64),
    ),
    "ConvNet": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
            *(nn.Flatten(), nn.Linear(32, 10)),
        ),
        _image,
    ),
    "ResNet": (lambda: Logits(_resnet()), _image),
    "MobileNetV2": (lambda: Logits(_mobilenet()), _image),
    "U-Net": (UNet, _image),
    "ViT": (
        lambda: Logits(tf.ViTForImageClassification(tf.ViTConfig(**_IMAGE, intermediate_size=128))),
        lambda: torch.randn(1, 3, 32, 32),
    ),
    "BERT": (
        lambda: Logits(tf.BertForSequenceClassification(tf.BertConfig(**_TEXT, intermediate_size=128))),
        _tokens,
    ),
    "Llama": (_hugging_face("LlamaForCausalLM", "LlamaConfig", **_DECODER), _tokens),
    "LSTM": (
        lambda: First(nn.LSTM(32, 32, num_layers=2, bidirectional=True)),
        lambda: torch.randn(10, 2, 32),
    ),
    "GRU": (lambda: First(nn.GRU(32, 32)), lambda: torch.randn(10, 2, 32)),
    "Transformer layer": (
        lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True),
        lambda: torch.randn(2, 16, 64),
    ),
    "audio encoder": (
        lambda: nn.Sequential(nn.Conv1d(1, 16, 10, 5), nn.GELU(), nn.Conv1d(16, 32, 3, 2), nn.GELU()),
        lambda: torch.randn(1, 1, 800),
    ),
    "DistilBERT": (
        _hugging_face(
            *("DistilBertModel", "DistilBertConfig"),
            vocab_size=1000,
            dim=64,
            n_layers=2,
            n_heads=4,
            hidden_dim=128,
        ),
        _tokens,
    ),
    "RoBERTa": (_hugging_face("RobertaModel", "RobertaConfig", **_WIDE), _tokens),
    "ALBERT": (_hugging_face("AlbertModel", "AlbertConfig", **_WIDE, embedding_size=32), _tokens),
    "ELECTRA": (_hugging_face("ElectraModel", "ElectraConfig", **_WIDE, embedding_size=32), _tokens),
    "MPNet": (_hugging_face("MPNetModel", "MPNetConfig", **_WIDE), _tokens),
    "DeBERTa": (_hugging_face("DebertaV2Model", "DebertaV2Config", **_WIDE), _tokens),
    "ConvBERT": (_hugging_face("ConvBertModel", "ConvBertConfig", **_WIDE), _tokens),
    "GPT-2": (_hugging_face("GPT2LMHeadModel", "GPT2Config", **_GPT2), _tokens),
    "OPT": (
        _hugging_face(
            *("OPTForCausalLM", "OPTConfig"), **_TEXT, ffn_dim=128, word_embed_proj_dim=64, use_cache=False
        ),
        _tokens,
    ),
    "GPT-NeoX": (_hugging_face("GPTNeoXForCausalLM", "GPTNeoXConfig", **_WIDE, use_cache=False), _tokens),
    "Mistral": (_hugging_face("MistralForCausalLM", "MistralConfig", **_DECODER), _tokens),
    "Qwen2": (_hugging_face("Qwen2ForCausalLM", "Qwen2Config", **_DECODER), _tokens),
    "Gemma": (_hugging_face("GemmaForCausalLM", "GemmaConfig", **_DECODER, head_dim=16), _tokens),
    "Phi": (_hugging_face("PhiForCausalLM", "PhiConfig", **_DECODER), _tokens),
    "T5 encoder": (
        _hugging_face(
            *("T5EncoderModel", "T5Config"),
            vocab_size=1000,
            d_model=64,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            d_kv=16,
        ),
        _tokens,
    ),
    "DeiT": (_hugging_face("DeiTModel", "DeiTConfig", **_IMAGE, intermediate_size=128), _small_image),
    "Swin": (
        _hugging_face(
            *("SwinModel", "SwinConfig"),
            image_size=32,
            patch_size=2,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
        ),
        _small_image,
    ),
    "ConvNeXt": (
        _hugging_face("ConvNextModel", "ConvNextConfig", hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 2, 1]),
        _image,
    ),
    "RegNet": (
        _hugging_face(
            *("RegNetModel", "RegNetConfig"),
            embedding_size=16,
            hidden_sizes=[16, 32, 32, 64],
            depths=[1, 1, 2, 1],
            groups_width=8,
        ),
        _image,
    ),
    "EfficientNet": (
        _hugging_face(
            "EfficientNetModel",
            "EfficientNetConfig",
            width_coefficient=0.25,
            depth_coefficient=0.1,
            hidden_dim=320,
        ),
        _image,
    ),
    "MobileNetV1": (_hugging_face("MobileNetV1Model", "MobileNetV1Config", depth_multiplier=0.25), _image),
    "SegFormer": (
        _hugging_face(
            *("SegformerForSemanticSegmentation", "SegformerConfig"),
            **{"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]},
            decoder_hidden_size=32,
        ),
        _image,
    ),
    "PoolFormer": (
        _hugging_face(
            "PoolFormerModel", "PoolFormerConfig", hidden_sizes=[16, 32, 32, 64], depths=[1, 1, 1, 1]
        ),
        _image,
    ),
    "YOLOS": (
        _hugging_face(
            *("YolosForObjectDetection", "YolosConfig"),
            **{**_IMAGE, "image_size": [32, 32]},
            intermediate_size=128,
            num_detection_tokens=5,
        ),
        _small_image,
    ),
    "pyramid of detection": (Pyramid, _image),
    "Wav2Vec2": (
        _hugging_face("Wav2Vec2Model", "Wav2Vec2Config", **_SPEECH, num_feat_extract_layers=2),
        lambda: torch.randn(1, 800),
    ),
    "AST": (
        _hugging_face(
            *("ASTModel", "ASTConfig"),
            **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128},
            max_length=64,
            num_mel_bins=32,
        ),
        lambda: torch.randn(1, 64, 32),
    ),
    "speech mask": (Separated, lambda: torch.randn(2, 20, 40)),
    "RNN": (lambda: First(nn.RNN(32, 32, 2)), lambda: torch.randn(10, 2, 32)),
}
