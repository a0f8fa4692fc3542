"""Tiny models of the families that matter, on CPU, made from a config alone: no download, milliseconds each.

Only builders live here; fixtures, pretrained models among them, live in `tests/conftest.py`.
The names are test vocabulary. Nothing in the package may depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

VOCAB_SIZE = 67
HIDDEN_SIZE = 64
IMAGE_SIZE = 32
NUM_LABELS = 3

#: Names that `tiny_config`, `tiny_model` and `tiny_inputs` accept.
NAMES = ("llama", "mistral", "qwen3", "gemma2", "gpt2", "bert", "roberta", "vit", "t5", "opt", "phi3")
#: Further names that they accept, of models which few tests are about.
MORE_NAMES = ("mixtral", "whisper")

_TOKENS: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_WIDTH: dict[str, Any] = {"hidden_size": HIDDEN_SIZE, "num_attention_heads": 4, "num_hidden_layers": 2}
_GROUPED: dict[str, Any] = {**_TOKENS, **_WIDTH, "num_key_value_heads": 2, "max_position_embeddings": 128}
_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

_SETTINGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # name: (config class, model class, settings); head_dim where it differs from hidden / heads on purpose.
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**_GROUPED, "intermediate_size": 172}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**_GROUPED, "intermediate_size": 160, "sliding_window": 16}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_GROUPED, "intermediate_size": 160, "head_dim": 32}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**_GROUPED, "intermediate_size": 160, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16},
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCAB_SIZE,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "n_embd": HIDDEN_SIZE,
            "n_head": 4,
            "n_layer": 3,
            "n_positions": 128,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "bert": (
        "BertConfig",
        "BertForSequenceClassification",
        {**_TOKENS, **_WIDTH, **_NO_DROPOUT, "intermediate_size": 128, "num_labels": NUM_LABELS},
    ),
    "roberta": (
        "RobertaConfig",
        "RobertaForSequenceClassification",
        {**_TOKENS, **_WIDTH, **_NO_DROPOUT, "intermediate_size": 128, "num_labels": NUM_LABELS},
    ),
    "vit": (
        "ViTConfig",
        "ViTForImageClassification",
        {
            **_WIDTH,
            **_NO_DROPOUT,
            "intermediate_size": 128,
            "image_size": IMAGE_SIZE,
            "patch_size": 8,
            "num_labels": NUM_LABELS,
        },
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCAB_SIZE,
            "d_model": HIDDEN_SIZE,
            "d_kv": 16,
            "d_ff": 128,
            "num_heads": 4,
            "num_layers": 2,
            "feed_forward_proj": "gated-gelu",
            "dropout_rate": 0.0,
            "pad_token_id": 0,
            "eos_token_id": 2,
            "decoder_start_token_id": 0,
        },
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            **_TOKENS,
            **_WIDTH,
            "ffn_dim": 128,
            "word_embed_proj_dim": HIDDEN_SIZE,
            "max_position_embeddings": 128,
            "dropout": 0.0,
        },
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {**_GROUPED, "intermediate_size": 160}),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**_GROUPED, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            **_TOKENS,
            "decoder_start_token_id": 1,
            "d_model": HIDDEN_SIZE,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "num_mel_bins": 16,
            "max_source_positions": 12,
            "max_target_positions": 32,
            "dropout": 0.0,
        },
    ),
}

#: Norms that multiply by (1 + weight).
_NORM_OFFSET = {"gemma2": 1.0}


def tiny_config(name: str, **overrides: Any) -> transformers.PretrainedConfig:
    """Config of the tiny model `name` (one of `NAMES`); `overrides` replace single settings."""
    config_class, _, settings = _SETTINGS[name]
    config: transformers.PretrainedConfig = getattr(transformers, config_class)(**{**settings, **overrides})
    return config


def tiny_model(
    name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> transformers.PreTrainedModel:
    """Model with a task head, in train mode, deterministic in `seed`.

    Norm weights get random sizes and signs, biases random values: with the usual ones and zeros a fold that
    loses gamma, beta or an offset would go unseen.
    """
    config = tiny_config(name, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: transformers.PreTrainedModel = getattr(transformers, _SETTINGS[name][1])(config)
        randomise_vectors_(model, norm_offset=_NORM_OFFSET.get(name, 0.0))
    for parameter in model.parameters():  # parameters only, as a load does: RoPE's frequencies stay fp32
        parameter.data = parameter.data.to(dtype)
    model.train()
    return model


def randomise_vectors_(model: nn.Module, norm_offset: float = 0.0) -> None:
    """Give every one-dimensional parameter of `model` values that no rewrite can lose unseen, in place.

    A one-dimensional `weight` belongs to a norm: `norm_offset` + weight, the factor it applies, becomes 0.5 to
    1.5 in size, of either sign. Every other vector is a bias: N(0, 0.1). Draws from torch's global generator.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim != 1:
                continue
            if name.endswith("weight"):
                signs = torch.where(torch.rand_like(parameter) < 0.5, -1.0, 1.0)
                parameter.copy_((torch.rand_like(parameter) + 0.5) * signs - norm_offset)
            else:
                parameter.normal_(std=0.1)


def tiny_inputs(
    name: str, batch: int = 2, seq: int = 8, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Keyword arguments of a training forward of `tiny_model(name)`, labels included, deterministic in `seed`.

    Token ids are (batch, seq) and avoid the special ids 0 to 2. Images are (batch, 3, 32, 32) in `dtype`; they
    have no `seq`.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = _INPUTS.get(name, _language_model_inputs)(batch, seq, generator)
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}


def _language_model_inputs(batch: int, seq: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    ids = _token_ids(batch, seq, generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def _classification_inputs(batch: int, seq: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    ids = _token_ids(batch, seq, generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": _class_labels(batch, generator)}


def _sequence_to_sequence_inputs(batch: int, seq: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    ids = _token_ids(batch, seq, generator)
    labels = _token_ids(batch, max(1, seq - 1), generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _image_inputs(batch: int, seq: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    pixels = torch.randn(batch, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    return {"pixel_values": pixels, "labels": _class_labels(batch, generator)}


def _speech_inputs(batch: int, seq: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    features = torch.randn(batch, 16, 24, generator=generator)  # the encoder's convolution halves the frames
    return {"input_features": features, "labels": _token_ids(batch, seq, generator)}


def _token_ids(batch: int, seq: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, VOCAB_SIZE, (batch, seq), generator=generator)


def _class_labels(batch: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(NUM_LABELS, (batch,), generator=generator)


_INPUTS: dict[str, Callable[[int, int, torch.Generator], dict[str, torch.Tensor]]] = {
    "bert": _classification_inputs,
    "roberta": _classification_inputs,
    "t5": _sequence_to_sequence_inputs,
    "vit": _image_inputs,
    "whisper": _speech_inputs,
}
