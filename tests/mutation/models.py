"""Small checkpoints for the catalogue of faults and for the clean runs: architectures, dtypes, kinds of weights."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from examples.demo.fetch_models import fetch
from memopt.verification.models import quiet
from memopt.walk.models.config import load_config, model_class
from tests.factories import NAMES, VOCAB_SIZE, randomise_vectors_, tiny_model
from tests.zoo.build import Row, config_of, twin_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

#: Architectures that faults are planted in: pre-norm, post-norm, (1 + weight), fused projections, experts, two stacks.
PLANTED_IN = ("llama", "gpt2", "bert", "vit", "mixtral", "gemma2", "t5", "qwen3_moe", "phi3")

_MOE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS = {
    "mixtral": ("MixtralConfig", {**_MOE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_MOE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "head_dim": 16},
    ),
}
#: Model types of the clean runs, beside those of `tests.factories`: experts, and small forms of their default configs.
_TYPES = (
    "olmoe", "granitemoe", "gpt_oss", "qwen2", "gemma", "olmo2", "cohere", "gpt_neox", "falcon", "bloom", "starcoder2",
    "distilbert", "electra", "deberta-v2", "bart",
)  # fmt: skip
ARCHITECTURES = (*NAMES, *_EXPERTS, *_TYPES)
KINDS = ("random", "outliers")
#: One checkpoint of each is patched with every shipped recipe: these, and convolutions and sounds.
FAMILIES = (*ARCHITECTURES, "whisper", "resnet", "wav2vec2")

#: Factors of the outlier channels of a norm, and the share of its channels that has each.
_OUTLIERS, _SHARE = (50.0, 0.01), 0.03
#: Pretrained models, and how many of their layers a checkpoint has; `Checkpoint.seed` says which.
PRETRAINED = {"SmolLM2-135M-Instruct": 2, "all-MiniLM-L6-v2": 2}
_WORDS = 1024


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint is made of."""

    architecture: str
    dtype: str
    """Key of `DTYPES`."""
    kind: str = "random"
    """``random``; ``outliers``: norms scale some channels up or down; ``pretrained``: an `architecture` of theirs."""
    seed: int = 0
    """Of the weights; for pretrained ones 0 to 2 choose the first, the middle or the last layers."""

    def __str__(self) -> str:
        return f"{self.architecture}-{self.kind}-{self.seed}-{self.dtype}"

    def write(self, folder: Path) -> Path:
        """Save the checkpoint as `folder`."""
        model = _pretrained(self.architecture, self.seed) if self.kind == "pretrained" else self._random()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(DTYPES[self.dtype])
        with quiet():
            model.save_pretrained(folder)
        return folder

    def _random(self) -> PreTrainedModel:
        if self.architecture in NAMES:
            model = tiny_model(self.architecture, seed=self.seed)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                config = _small_config(self.architecture)
                model = model_class(config)(config)
                randomise_vectors_(model)
        if self.kind == "outliers":
            _add_outliers_(model, self.seed)
        return model


@functools.cache
def _small_config(architecture: str) -> PretrainedConfig:
    if architecture in _EXPERTS:
        name, settings = _EXPERTS[architecture]
        config: PretrainedConfig = getattr(transformers, name)(**settings)
    else:
        config = twin_of(config_of(Row(architecture))).config
    return config


def _add_outliers_(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and name.endswith("weight"):
            few = max(1, round(_SHARE * parameter.numel()))
            channels = torch.randperm(parameter.numel(), generator=generator)[: few * len(_OUTLIERS)]
            for factor, chosen in zip(_OUTLIERS, channels.chunk(len(_OUTLIERS)), strict=True):
                parameter.data[chosen] *= factor


def _pretrained(name: str, place: int) -> PreTrainedModel:
    """Some layers of a pretrained model between its embeddings of the first words and its head."""
    config = load_config(fetch(name))
    with quiet():
        model: PreTrainedModel = model_class(config).from_pretrained(fetch(name), dtype=torch.float32)
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    count = PRETRAINED[name]
    first = place * (len(layers) - count) // 2
    kept = [layers[index] for index in range(first, first + count)]
    del layers[:]
    layers.extend(kept)
    model.resize_token_embeddings(_WORDS)
    model.config.num_hidden_layers = count
    if hasattr(model.config, "layer_types"):
        model.config.layer_types = model.config.layer_types[:count]
    return model
