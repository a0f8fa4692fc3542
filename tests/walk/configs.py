"""Configs in the shapes that people fine-tune, and their twins, each built once. Made without a download."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from memopt.walk.calls.arguments import candidates
from memopt.walk.calls.inputs import Calls, runnable_calls
from memopt.walk.calls.twin import build_twin
from memopt.walk.models.shrink.config import shrunken

_LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [1.5] * 48}
_QWEN_VL_TEXT = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}

#: Family -> (config class, settings that differ from the class's defaults, which are those of a published model).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 8, "intermediate_size": 14336}),
    "mistral": ("MistralConfig", {}),
    "mixtral": ("MixtralConfig", {}),
    "qwen2": ("Qwen2Config", {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3Config", {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}),
    "gemma": ("GemmaConfig", {"num_key_value_heads": 1}),
    "gemma2": ("Gemma2Config", {}),
    "gemma3": ("Gemma3TextConfig", {}),
    "gpt2": ("GPT2Config", {}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "phi3": ("Phi3Config", {"max_position_embeddings": 131072, "rope_parameters": _LONG_ROPE}),
    "falcon": ("FalconConfig", {}),
    "bloom": ("BloomConfig", {"hidden_size": 4096, "n_head": 32, "n_layer": 30}),
    "opt": ("OPTConfig", {"hidden_size": 1024, "num_attention_heads": 16, "word_embed_proj_dim": 512}),
    "bert": ("BertConfig", {}),
    "roberta": ("RobertaConfig", {}),
    "distilbert": ("DistilBertConfig", {}),
    "albert": ("AlbertConfig", {}),
    "t5": ("T5Config", {}),
    "bart": ("BartConfig", {}),
    "whisper": ("WhisperConfig", {}),
    "vit": ("ViTConfig", {}),
    "deit": ("DeiTConfig", {}),
    "clip": ("CLIPConfig", {}),
    "clip_vision": ("CLIPVisionConfig", {}),
    "swin": ("SwinConfig", {}),
    "qwen2_vl": ("Qwen2VLConfig", {"text_config": _QWEN_VL_TEXT, "vision_config": {"hidden_size": 3584}}),
}

#: Families whose forward takes an attention mask.
MASKED = tuple(name for name in FAMILIES if name not in ("whisper", "vit", "deit", "clip_vision", "swin"))


def make_config(family: str, **settings: Any) -> PreTrainedConfig:
    """Config of `family` in its real size, with `settings` changed."""
    name, changed = FAMILIES[family]
    build: Callable[..., PreTrainedConfig] = getattr(transformers, name)
    return build(**{**changed, **settings})


def llama_8b() -> PreTrainedConfig:
    return make_config("llama", vocab_size=128256, bos_token_id=128000, eos_token_id=[128001, 128009])


def llama_70b() -> PreTrainedConfig:
    wide = {"hidden_size": 8192, "num_attention_heads": 64, "intermediate_size": 28672, "num_hidden_layers": 80}
    return make_config("llama", vocab_size=128256, bos_token_id=128000, eos_token_id=[128001, 128009], **wide)


def tiny_llama(**settings: Any) -> PreTrainedConfig:
    tiny = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 80}
    return make_config("llama", **{**tiny, "num_hidden_layers": 3, "vocab_size": 61, **settings})


@cache
def twin(family: str) -> PreTrainedModel:
    """The fp32 twin of `family`, shared: read it, do not change it."""
    return build_twin(make_config(family), dtype=torch.float32)


@cache
def twin_calls(family: str) -> Calls:
    return runnable_calls(twin(family))


def inputs_of(model: nn.Module, variant: str = "plain", seed: int = 0) -> dict[str, Any]:
    """The likeliest arguments of the model's forward, on the CPU and in fp32."""
    return next(kwargs for _, kwargs in candidates(model, variant, seed))


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """The first small config of `config` that builds."""
    return next(shrunken(config))
