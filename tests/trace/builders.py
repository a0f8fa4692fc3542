"""Models in the size of the published memory tables (hidden 512, bf16), and how to count their blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from memopt.trace.account import Account, account
from memopt.walk.models.build import build_meta
from memopt.walk.observe import find_sites
from memopt.walk.sites import Sites
from tests.factories import tiny_config, tiny_inputs, tiny_model

HIDDEN, BATCH, SEQ = 512, 1, 64
IMAGE_TOKENS = 197


def table_model(name: str, layers: int) -> PreTrainedModel:
    """Llama with multi-head attention and f/d = 2.6875, or BERT or ViT with f/d = 4; bf16, no dropout, train mode."""
    wide = {
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "num_attention_heads": 8,
        "num_hidden_layers": layers,
    }
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name == "llama":
        settings = {**wide, "intermediate_size": 1376, "num_attention_heads": 4, "num_key_value_heads": 4}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings, vocab_size=99, use_cache=False))
    elif name == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**wide, **no_dropout, vocab_size=99))
    else:
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**wide, **no_dropout))
    return model.to(torch.bfloat16).train()


def table_run(name: str, model: nn.Module) -> Callable[[], Any]:
    """A training forward of `model` in the size of the tables."""
    if name == "vit":
        pixels = torch.zeros(BATCH, 3, 224, 224, dtype=torch.bfloat16)
        return lambda: model(pixel_values=pixels, labels=torch.zeros(BATCH, dtype=torch.long))
    ids = torch.arange(BATCH * SEQ).reshape(BATCH, SEQ) % 99
    return lambda: model(input_ids=ids, labels=ids)


def units_of_one_block(name: str, change: Callable[[PreTrainedModel], nn.Module] = lambda model: model) -> float:
    """Units that the third block adds to a model of two, after `change`."""
    totals = []
    for layers in (2, 3):
        model = table_model(name, layers)
        totals.append(account(model, table_run(name, change(model))).total)
    tokens = BATCH * (IMAGE_TOKENS if name == "vit" else SEQ)
    return (totals[1] - totals[0]) / (tokens * HIDDEN * 2)


def with_lora(model: PreTrainedModel, targets: str | list[str] = "all-linear") -> nn.Module:
    """`model` with rank-8 adapters in its own dtype."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, target_modules=targets, lora_dropout=0.0)
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def named_config(name: str, **overrides: Any) -> PreTrainedConfig:
    """Config of a tiny model that names its class, as a saved one does."""
    config = tiny_config(name, **overrides)
    config.architectures = [type(tiny_model(name)).__name__]
    return config


_known_sites: dict[str, Sites] = {}


def sites_of(config: PreTrainedConfig) -> Sites:
    """What the walk finds; each config is walked once."""
    key = config.to_json_string(use_diff=False)
    if key not in _known_sites:
        _known_sites[key] = find_sites(build_meta(config))
    return _known_sites[key]


def real_account(name: str, model: nn.Module, sites: Sites, batch: int, seq: int) -> Account:
    """Account of a real fp32 forward of the tiny model `name`."""
    inputs = tiny_inputs(name, batch, seq)
    model.config.use_cache = False  # as Trainer does; a cache copies keys and values
    return account(model, lambda: model(**inputs), blocks=sites.blocks, sites=sites)
