"""The models of benchmarks/gpu/first_step.py, the ways in which they are trained, and their batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Way:
    """How a model is trained, stock and patched alike, and the recipe of the patched one."""

    recipe: str = "exact-unfolded"
    lora: bool = False
    autocast: bool = False
    checkpointing: bool = False


WAYS = {
    "exact-unfolded": Way(),
    "exact-levels": Way("exact-levels"),
    "LoRA": Way(lora=True),
    "autocast": Way(autocast=True),
    "checkpointing": Way(checkpointing=True),
    "offload": Way("long-context", checkpointing=True),
}


@dataclass(frozen=True)
class Model:
    """A config, the class of its head, and a batch: of rows of tokens, or of images."""

    config: str
    head: str
    real: dict[str, Any]
    dry: dict[str, Any]
    batch: tuple[int, int] = (2, 512)
    """Rows and tokens; an image has its own number of tokens."""


_TINY = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 172}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "Llama": Model(
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
            "num_hidden_layers": 4, "vocab_size": 32000, "use_cache": False,
        },
        {**_TINY, "num_key_value_heads": 2, "vocab_size": 67, "use_cache": False},
    ),
    "BERT": Model(
        "BertConfig", "BertForMaskedLM", _NO_DROPOUT, {**_TINY, **_NO_DROPOUT, "vocab_size": 67}, batch=(8, 256)
    ),
    "ViT": Model(
        "ViTConfig",
        "ViTForImageClassification",
        _NO_DROPOUT,
        {**_TINY, **_NO_DROPOUT, "image_size": 32, "patch_size": 8},
        batch=(16, 0),
    ),
    "T5": Model(
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "d_model": 768, "d_ff": 3072, "num_heads": 12, "num_layers": 6, "dropout_rate": 0.0,
            "use_cache": False, "decoder_start_token_id": 0,
        },
        {
            "d_model": 64, "d_ff": 172, "num_heads": 4, "d_kv": 16, "num_layers": 2, "dropout_rate": 0.0,
            "vocab_size": 67, "use_cache": False, "decoder_start_token_id": 0,
        },
        batch=(8, 256),
    ),
}  # fmt: skip


def build(model: Model, way: Way, dtype: torch.dtype, device: str, dry_run: bool) -> nn.Module:
    """The model with the same random weights at every call, in train mode, adapted and checkpointed as `way` says."""
    import transformers

    config: Any = getattr(transformers, model.config)(**(model.dry if dry_run else model.real))
    torch.manual_seed(0)
    with torch.device(device):  # a GPU draws the weights in no time
        built: Any = getattr(transformers, model.head)(config)
    built = built.to(device, dtype)
    if way.lora:
        from peft import LoraConfig, get_peft_model

        built = get_peft_model(built, LoraConfig(r=8, target_modules="all-linear"))
        for name, parameter in built.named_parameters():
            if "lora_B" in name:  # zeros: the gradients of A would be zeros too
                nn.init.normal_(parameter, std=0.02)
    if way.checkpointing:
        built.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if way.lora:
            built.enable_input_require_grads()
    trained: nn.Module = built.train()
    return trained


def batch(model: Model, dry_run: bool) -> dict[str, Tensor]:
    """Random inputs on the CPU; every label counts."""
    sizes = model.dry if dry_run else model.real
    generator = torch.Generator().manual_seed(1)
    rows, tokens = (2, 16) if dry_run else model.batch
    if model.config == "ViTConfig":
        edge = sizes.get("image_size", 224)
        return {
            "pixel_values": torch.randn(rows, 3, edge, edge, generator=generator),
            "labels": torch.arange(rows) % 2,
        }
    ids = torch.randint(3, min(sizes.get("vocab_size", 30000), 30000), (rows, tokens), generator=generator)
    return {"input_ids": ids, "labels": ids}
