"""Audio and time series models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

from tests.models.families.family_registry import BRANCHES, READS, READS_LABELS, family, tokens

W2V = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "conv_dim": [8, 8],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "num_labels": 3,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "pad_token_id": 0,
}


def waves(
    name: str,
    config: Any,
    model: Any,
    labels: Callable[[int], torch.Tensor],
    settings: dict[str, Any] | None = None,
    **more: Any,
) -> None:
    options = {k: more.pop(k) for k in ("refused",) if k in more}

    @family(name, **options)
    def make() -> Any:
        net = model(config(**{**(W2V if settings is None else settings), **more}))
        return net, [
            {"input_values": torch.randn(b, n), "labels": labels(b)} for b, n in ((2, 200), (3, 260))
        ]


def classes(count: int) -> torch.Tensor:
    return torch.randint(0, 3, (count,))


def letters(count: int) -> torch.Tensor:
    return torch.randint(1, 20, (count, 3))


waves("wav2vec2", hf.Wav2Vec2Config, hf.Wav2Vec2ForSequenceClassification, classes)
waves(
    "wav2vec2_ctc",
    hf.Wav2Vec2Config,
    hf.Wav2Vec2ForCTC,
    letters,
    refused=READS.format("Wav2Vec2ForCTC", READS_LABELS),
)
waves("hubert", hf.HubertConfig, hf.HubertForSequenceClassification, classes)
waves(
    "hubert_ctc",
    hf.HubertConfig,
    hf.HubertForCTC,
    letters,
    refused=READS.format("HubertForCTC", READS_LABELS),
)
waves("wavlm", hf.WavLMConfig, hf.WavLMForSequenceClassification, classes)
waves("unispeech", hf.UniSpeechConfig, hf.UniSpeechForSequenceClassification, classes)
waves("sew", hf.SEWConfig, hf.SEWForSequenceClassification, classes, squeeze_factor=2)
waves(
    "data2vec_audio",
    hf.Data2VecAudioConfig,
    hf.Data2VecAudioForSequenceClassification,
    classes,
    conv_pos_kernel_size=3,
    num_conv_pos_embeddings=2,
)


@family("whisper")
def whisper() -> Any:
    config = hf.WhisperConfig(
        vocab_size=50,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=8,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return hf.WhisperForConditionalGeneration(config), [
        {"input_features": torch.randn(b, 8, 16), "labels": tokens(b, n)} for b, n in ((2, 5), (3, 7))
    ]


@family("speech_to_text")
def speech_to_text() -> Any:
    config = hf.Speech2TextConfig(
        vocab_size=50,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=64,
        max_target_positions=16,
        input_feat_per_channel=8,
        conv_channels=16,
        num_conv_layers=2,
        conv_kernel_sizes=[3, 3],
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
    )
    return hf.Speech2TextForConditionalGeneration(config), [
        {"input_features": torch.randn(b, t, 8), "labels": tokens(b, 5)} for b, t in ((2, 16), (3, 24))
    ]


@family("audio_spectrogram_transformer")
def audio_spectrogram_transformer() -> Any:
    config = hf.ASTConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        patch_size=4,
        frequency_stride=4,
        time_stride=4,
        max_length=16,
        num_mel_bins=8,
        num_labels=3,
    )
    return hf.ASTForAudioClassification(config), [
        {"input_values": torch.randn(n, 16, 8), "labels": torch.randint(0, 3, (n,))} for n in (2, 3)
    ]


SERIES = {
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "prediction_length": 3,
    "context_length": 6,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
}


def series(name: str, config: Any, model: Any, settings: dict[str, Any], **options: Any) -> None:
    @family(name, **options)
    def make() -> Any:
        def batch(n: int) -> dict[str, torch.Tensor]:
            return {
                "past_values": torch.randn(n, 8),
                "past_time_features": torch.randn(n, 8, 1),
                "past_observed_mask": torch.ones(n, 8),
                "future_values": torch.randn(n, 3),
                "future_time_features": torch.randn(n, 3, 1),
            }

        return model(config(**settings)), [batch(n) for n in (2, 3)]


series(
    "informer",
    hf.InformerConfig,
    hf.InformerForPrediction,
    SERIES,
)


@family("patchtst")
def patchtst() -> Any:
    config = hf.PatchTSTConfig(
        num_input_channels=2,
        context_length=16,
        patch_length=4,
        patch_stride=4,
        d_model=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=16,
        prediction_length=4,
    )
    return hf.PatchTSTForPrediction(config), [
        {"past_values": torch.randn(n, 16, 2), "future_values": torch.randn(n, 4, 2)} for n in (2, 3)
    ]


@family("patchtsmixer")
def patchtsmixer() -> Any:
    config = hf.PatchTSMixerConfig(
        num_input_channels=2,
        context_length=16,
        patch_length=4,
        patch_stride=4,
        d_model=8,
        num_layers=1,
        prediction_length=4,
    )
    return hf.PatchTSMixerForPrediction(config), [
        {"past_values": torch.randn(n, 16, 2), "future_values": torch.randn(n, 4, 2)} for n in (2, 3)
    ]


@family("decision_transformer")
def decision_transformer() -> Any:
    config = hf.DecisionTransformerConfig(
        state_dim=3, act_dim=2, hidden_size=16, max_ep_len=16, n_layer=1, n_head=2, n_positions=64
    )

    def batch(b: int, n: int) -> dict[str, torch.Tensor]:
        return {
            "states": torch.randn(b, n, 3),
            "actions": torch.randn(b, n, 2),
            "rewards": torch.randn(b, n, 1),
            "returns_to_go": torch.randn(b, n, 1),
            "timesteps": torch.arange(n).expand(b, n).contiguous(),
            "attention_mask": torch.ones(b, n),
        }

    return hf.DecisionTransformerModel(config), [batch(2, 4), batch(3, 6)]


@family("encodec", refused=READS.format("EncodecModel", BRANCHES))
def encodec() -> Any:
    config = hf.EncodecConfig(
        target_bandwidths=[1.5],
        sampling_rate=800,
        num_filters=4,
        num_residual_layers=1,
        upsampling_ratios=[4, 2],
        codebook_size=16,
        codebook_dim=8,
        hidden_size=8,
        num_lstm_layers=1,
        compress=2,
    )
    return hf.EncodecModel(config), [{"input_values": torch.randn(b, 1, 64)} for b in (2, 3)]
