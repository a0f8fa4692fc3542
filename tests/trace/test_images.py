"""Steps of text with images: how many there are, how large, and the bytes of a real step of this size."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig

from memopt.errors import ModelError, UsageError
from memopt.reporting.build import compare_training
from memopt.trace import emulate, estimate
from memopt.trace.account import account
from memopt.trace.arguments import example_of, step_arguments
from memopt.trace.trace import trace_account
from memopt.trace.training import Request, Step, Training
from memopt.walk.models.build import build_meta
from memopt.walk.models.config import model_class
from memopt.walk.observe import find_sites
from tests.factories import tiny_config

_TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
}  # fmt: skip
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


def _config(kind: str, vision: dict[str, Any], text: dict[str, Any] | None = None, **options: Any) -> PreTrainedConfig:
    """A tiny model of text and images, whose last token of the vocabulary stands for an image's feature."""
    text = {**_TEXT, "model_type": "llama", **(text or {})}
    token = "image_token_id" if kind in ("idefics3", "qwen2_5_vl") else "image_token_index"
    return AutoConfig.for_model(kind, text_config=text, vision_config=vision, **{token: 63}, **options)


def llava() -> PreTrainedConfig:
    """One image has (32 / 8) ** 2 features."""
    return _config("llava", {**_VISION, "model_type": "clip_vision_model", "image_size": 32, "patch_size": 8})


def qwen() -> PreTrainedConfig:
    """Images of any size, all patches in one list; 2 x 2 patches of 14 pixels are a feature."""
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32,
              "fullatt_block_indexes": [0]}  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text = {"model_type": "qwen2_5_vl_text", "rope_parameters": rope}
    ends = {"vision_start_token_id": 61, "vision_end_token_id": 60, "video_token_id": 62}
    return _config("qwen2_5_vl", vision, text, **ends)


def idefics() -> PreTrainedConfig:
    """Its method for features reads values, so their number is guessed: 2 x 2 patches of 8 pixels are one."""
    return _config("idefics3", {**_VISION, "image_size": 32, "patch_size": 8}, scale_factor=2)


def mistral() -> PreTrainedConfig:
    """The size of each image is an argument; 2 x 2 patches are a feature."""
    vision = {**_VISION, "model_type": "pixtral", "image_size": 64, "patch_size": 8, "head_dim": 16}
    return _config("mistral3", vision, spatial_merge_size=2)


def clip() -> PreTrainedConfig:
    """The forward's docstring gives the size of images by the config."""
    vision = transformers.CLIPVisionConfig(**_VISION, image_size=32, patch_size=8)
    return transformers.CLIPConfig(vision_config=vision.to_dict(), architectures=["CLIPForImageClassification"])


def patchtst() -> PreTrainedConfig:
    """Series of numbers."""
    return transformers.PatchTSTConfig(d_model=16, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2)


#: Name -> config, pixels a side that are asked for, and features of an image then.
MODELS = {
    "llava": (llava(), None, 16),
    "qwen2_5_vl": (qwen(), None, 256),
    "qwen2_5_vl of 64 pixels": (qwen(), 64, 4),
    "idefics3": (idefics(), None, 4),
    "mistral3": (mistral(), None, 16),
    "mistral3 of 32 pixels": (mistral(), 32, 4),
}


@pytest.fixture(autouse=True)
def _cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulate, "CudaChoices", contextlib.nullcontext)
    monkeypatch.setattr(estimate, "CudaChoices", contextlib.nullcontext)


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.rotates(3)
def test_a_row_has_the_images_and_the_tokens_that_are_asked_for(name: str, images: int) -> None:
    config, side, features = MODELS[name]
    sites, seq = find_sites(build_meta(config)), 3 * 256 + 32
    training = Training(2, seq, "fp32", dropout=False, cuda_kernels=False, images=images, image_side=side)
    example = example_of(config, sites, training)
    ids = example.inputs["input_ids"]
    assert ids.shape == (2, seq)
    assert (ids == 63).sum(1).tolist() == [images * features] * 2
    traced = trace_account(Step(config, training, sites))
    torch.manual_seed(0)
    model = model_class(config)(config).eval()
    model.config.use_cache = False
    arguments = step_arguments(model, training, example, real=True)
    real = account(model, lambda: model(**arguments), blocks=sites.blocks, sites=sites)
    assert traced.per_block() == real.per_block()
    assert traced.per_cause() == real.per_cause()
    assert traced.total > trace_account(Step(config, Training(2, seq, "fp32", dropout=False), sites)).total


def test_the_report_names_the_images(tmp_path: Path) -> None:
    llava().save_pretrained(tmp_path)
    found = compare_training(Request(tmp_path, batch=2, seq=64, images=2, image_side=32))
    assert "batch 2 x 64 tokens, 2 images a row of 32 x 32, bf16" in str(found.step.training)
    assert [note for note in found.before.notes if note.startswith("Inputs: ")] == [
        "Inputs: pixel_values 4 x 3 x 32 x 32; others with --inputs batch.pt."
    ]


def test_an_image_alone_may_have_another_side(tmp_path: Path) -> None:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], architectures=["ResNetForImageClassification"]
    )
    config.save_pretrained(tmp_path)
    small, large = (compare_training(Request(tmp_path, image_side=side)).before for side in (64, 128))
    assert small.notes != large.notes
    assert 3.5 < large.total / small.total < 4.5


def test_an_error_of_a_step_with_images_names_the_option_for_their_size(tmp_path: Path) -> None:
    tower = {**_VISION, "model_type": "dinov2", "image_size": 32, "patch_size": 8}
    towers = {f"{part}_model_config": tower for part in ("image", "patch", "fov")}
    config = transformers.DepthProConfig(**towers, patch_size=32, fusion_hidden_size=16)
    config.architectures = ["DepthProModel"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="too small") as raised:
        compare_training(Request(tmp_path))
    assert "--image-side" in str(raised.value.hint)
    assert "--inputs" in str(raised.value.hint)


@pytest.mark.parametrize(
    ("config", "asked", "message"),
    [
        (tiny_config("llama"), {"images": 1}, "LlamaForCausalLM has no token that stands for an image in text"),
        (llava(), {"images": 2, "seq": 32}, "A row of 32 tokens is too short for images of 32 tokens"),
        (qwen(), {"images": 1, "seq": 200}, "A row of 200 tokens is too short for images of 258 tokens"),
        (llava(), {"images": 1, "image_side": 64}, "LlavaForConditionalGeneration cannot be traced"),
        (clip(), {"image_side": 64}, r"Input image size \(64\*64\) doesn't match .*Leave out --image-side"),
        (patchtst(), {"image_side": 64}, "The step has no image, so --image-side has no effect"),
    ],
    ids=["no token", "too short", "too short with ends", "one size only", "one size only, without text", "no image"],
)
def test_images_that_a_model_does_not_take_are_an_error(
    config: PreTrainedConfig, asked: dict[str, int], message: str, tmp_path: Path
) -> None:
    config.architectures = [model_class(config).__name__]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        compare_training(Request(tmp_path, **{"seq": 64, **asked}))


@pytest.mark.parametrize("asked", [{"images": 0}, {"image_side": 2.5}, {"images": 1, "inputs": {"input_ids": 1}}])
def test_images_that_cannot_be_are_refused(asked: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="image"):
        Request(tmp_path, **asked)
