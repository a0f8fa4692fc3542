"""Models of other libraries than transformers: small ones, from their classes alone, and a batch for each.

The batch is for comparisons. `memopt.patch` is given none: it guesses its inputs from the signature of the forward.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import nn

from tests.zoo.relu_gpt import VOCABULARY, ReluGPT

Batch = dict[str, Any]


@dataclass(frozen=True)
class LibraryModel:
    """One model of a library."""

    library: str
    """The Python package; `tests` for one that is written here, in the form of a repository that is no package."""
    name: str
    make: Callable[[], nn.Module]
    """In fp32, with initial weights."""
    batch: Callable[[], Batch]
    """Keyword arguments of the forward; floating ones in fp32."""

    @property
    def key(self) -> str:
        return f"{self.library} {self.name}"

    @property
    def installed(self) -> bool:
        return find_spec(self.library) is not None


# --- timm -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_torchvision() -> Iterator[None]:
    """Inside, `import timm` runs where torchvision is missing: its data sets need that, its models do not."""
    missing = [] if find_spec("torchvision") else ["", *_OF_TORCHVISION]
    names = [".".join(filter(None, ("torchvision", name))) for name in missing]
    try:
        for name in names:
            stand_in = MagicMock(__spec__=None, __path__=[], __version__="0.0.0", __name__=name)
            sys.modules[name] = stand_in
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)


_OF_TORCHVISION = (
    *("transforms", "transforms.functional", "transforms.v2", "datasets", "datasets.folder"),
    *("ops", "ops.misc", "models", "models.feature_extraction", "io"),
)


def _timm(model: str, side: int = 64, **settings: Any) -> LibraryModel:
    def make() -> nn.Module:
        with without_torchvision():
            timm = importlib.import_module("timm")
        created: nn.Module = timm.create_model(model, num_classes=10, **settings)
        return created

    return LibraryModel("timm", model, make, lambda: {"x": torch.randn(2, 3, side, side)})


# --- diffusers ------------------------------------------------------------------------------------------------------


def _diffusers(cls: str, batch: Callable[[], Batch], **settings: Any) -> LibraryModel:
    def make() -> nn.Module:
        created: nn.Module = getattr(importlib.import_module("diffusers"), cls)(**settings)
        return created

    return LibraryModel("diffusers", cls, make, batch)


def _time(of: float = 10.0) -> torch.Tensor:
    return torch.full((2,), of)


_UNET = {
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "norm_num_groups": 8,
}

# --- sentence-transformers ------------------------------------------------------------------------------------------


def sentence_transformer() -> nn.Module:
    """A BERT of two layers with a pooling, and a tokenizer of the words w0 to w59."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    library: Any = importlib.import_module("sentence_transformers")
    modules: Any = importlib.import_module("sentence_transformers.sentence_transformer.modules")
    words = ["[PAD]", "[UNK]", *(f"w{place}" for place in range(60))]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = BertConfig(
        vocab_size=len(words), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
        fast.save_pretrained(folder)
        BertModel(config).save_pretrained(folder)
        made: nn.Module = library.SentenceTransformer(
            modules=[modules.Transformer(folder), modules.Pooling(64)], device="cpu"
        )
    return made


def _sentences() -> Batch:
    return {"input": {"input_ids": torch.randint(2, 60, (2, 8)), "attention_mask": torch.ones(2, 8, dtype=torch.long)}}


def _ids(rows: int = 2, tokens: int = 33) -> Batch:
    ids = torch.randint(0, VOCABULARY, (rows, tokens))
    return {"idx": ids[:, :-1], "targets": ids[:, 1:].contiguous()}


MODELS: tuple[LibraryModel, ...] = (
    _timm("vit_tiny_patch16_224", img_size=64, depth=2),
    _timm("swin_tiny_patch4_window7_224", 224, depths=(2, 2), num_heads=(3, 6)),
    _timm("eva02_tiny_patch14_224", 56, img_size=56, depth=2),
    _timm("convnext_atto", depths=(1, 1, 2, 1)),
    _timm("resnet18"),
    _timm("resnet50"),
    _timm("efficientnet_b0"),
    _timm("mobilenetv3_small_100"),
    _timm("regnety_002"),
    _timm("densenet121"),
    _timm("beit_base_patch16_224", 224, embed_dim=64, num_heads=4, depth=2),
    _diffusers(
        "UNet2DConditionModel",
        lambda: {
            "sample": torch.randn(2, 4, 16, 16),
            "timestep": _time(),
            "encoder_hidden_states": torch.randn(2, 8, 32),
        },
        **_UNET,
        cross_attention_dim=32,
        attention_head_dim=4,
        sample_size=16,
    ),
    _diffusers(
        "UNet2DModel",
        lambda: {"sample": torch.randn(2, 3, 16, 16), "timestep": _time()},
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        sample_size=16,
    ),
    _diffusers(
        "DiTTransformer2DModel",
        lambda: {
            "hidden_states": torch.randn(2, 4, 16, 16),
            "timestep": torch.tensor([1, 2]),
            "class_labels": torch.tensor([1, 2]),
        },
        num_attention_heads=4,
        attention_head_dim=16,
        num_layers=2,
        sample_size=16,
    ),
    _diffusers(
        "FluxTransformer2DModel",
        lambda: {
            "hidden_states": torch.randn(2, 64, 16),
            "encoder_hidden_states": torch.randn(2, 16, 32),
            "pooled_projections": torch.randn(2, 32),
            "timestep": _time(1.0),
            "img_ids": torch.randn(64, 3),
            "txt_ids": torch.randn(16, 3),
        },
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(8, 12, 12),
    ),
    _diffusers(
        "SD3Transformer2DModel",
        lambda: {
            "hidden_states": torch.randn(2, 4, 16, 16),
            "encoder_hidden_states": torch.randn(2, 16, 32),
            "pooled_projections": torch.randn(2, 64),
            "timestep": _time(1.0),
        },
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=128,
        pooled_projection_dim=64,
        out_channels=4,
    ),
    _diffusers(
        "WanTransformer3DModel",
        lambda: {
            "hidden_states": torch.randn(2, 4, 2, 8, 8),
            "timestep": torch.tensor([10, 20]),
            "encoder_hidden_states": torch.randn(2, 16, 32),
        },
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=64,
        ffn_dim=256,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    ),
    _diffusers(
        "QwenImageTransformer2DModel",
        lambda: {
            "hidden_states": torch.randn(2, 16, 16),
            "encoder_hidden_states": torch.randn(2, 8, 32),
            "encoder_hidden_states_mask": torch.ones(2, 8, dtype=torch.long),
            "timestep": _time(0.5),
            "img_shapes": [[(1, 4, 4)]] * 2,
        },
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=32,
        axes_dims_rope=(8, 12, 12),
    ),
    _diffusers(
        "AutoencoderKL",
        lambda: {"sample": torch.randn(2, 3, 32, 32)},
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
        sample_size=32,
    ),
    _diffusers(
        "PixArtTransformer2DModel",
        lambda: {
            "hidden_states": torch.randn(2, 4, 16, 16),
            "encoder_hidden_states": torch.randn(2, 8, 32),
            "timestep": torch.tensor([1, 2]),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
        num_attention_heads=4,
        attention_head_dim=16,
        num_layers=2,
        sample_size=16,
        cross_attention_dim=64,
        caption_channels=32,
    ),
    _diffusers(
        "CogVideoXTransformer3DModel",
        lambda: {
            "hidden_states": torch.randn(2, 1, 4, 8, 8),
            "encoder_hidden_states": torch.randn(2, 8, 32),
            "timestep": torch.tensor([1, 2]),
        },
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=32,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=1,
        max_text_seq_length=8,
    ),
    _diffusers(
        "LTXVideoTransformer3DModel",
        lambda: {
            "hidden_states": torch.randn(2, 32, 8),
            "encoder_hidden_states": torch.randn(2, 8, 32),
            "timestep": torch.tensor([1, 2]),
            "encoder_attention_mask": torch.ones(2, 8, dtype=torch.bool),
            "num_frames": 2,
            "height": 4,
            "width": 4,
        },
        in_channels=8,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=16,
        cross_attention_dim=64,
        num_layers=2,
        caption_channels=32,
    ),
    _diffusers(
        "SanaTransformer2DModel",
        lambda: {
            "hidden_states": torch.randn(2, 4, 16, 16),
            "encoder_hidden_states": torch.randn(2, 8, 32),
            "timestep": torch.tensor([1, 2]),
        },
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=4,
        attention_head_dim=16,
        num_cross_attention_heads=4,
        cross_attention_head_dim=16,
        cross_attention_dim=64,
        caption_channels=32,
        sample_size=16,
    ),
    _diffusers(
        "HunyuanVideoTransformer3DModel",
        lambda: {
            "hidden_states": torch.randn(2, 4, 1, 8, 8),
            "timestep": torch.tensor([1, 2]),
            "encoder_hidden_states": torch.randn(2, 8, 32),
            "encoder_attention_mask": torch.ones(2, 8, dtype=torch.long),
            "pooled_projections": torch.randn(2, 32),
            "guidance": _time(),
        },
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=2,
        patch_size_t=1,
        text_embed_dim=32,
        pooled_projection_dim=32,
        rope_axes_dim=(4, 6, 6),
    ),
    _diffusers(
        "AuraFlowTransformer2DModel",
        lambda: {
            "hidden_states": torch.randn(2, 4, 16, 16),
            "encoder_hidden_states": torch.randn(2, 8, 32),
            "timestep": _time(0.5),
        },
        sample_size=16,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=64,
        out_channels=4,
    ),
    LibraryModel("sentence_transformers", "SentenceTransformer", sentence_transformer, _sentences),
    LibraryModel("tests", "GPT of nanochat's form", ReluGPT, _ids),
)
