"""Inputs of a training step: of its size, and those with which the forward runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, Wav2Vec2Config
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig

from memopt.errors import ModelError
from memopt.walk.calls.arguments.request import Size
from memopt.walk.calls.inputs import Call, run_once, step_inputs
from memopt.walk.models.build import build_meta
from memopt.walk.models.shrink.depth import with_depth
from tests.walk.configs import FAMILIES, make_config

ROWS, TOKENS = 3, 24
_DIA = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 90,
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gets_inputs_of_the_size_of_the_step(family: str) -> None:
    model = build_meta(with_depth(make_config(family), 2))
    inputs = step_inputs(model, Size(ROWS, TOKENS))
    run_once(model, Call("", {name: to_meta(value) for name, value in inputs.items()}))
    for name in {"input_ids", "attention_mask", "decoder_input_ids"} & inputs.keys():
        assert inputs[name].shape == (ROWS, TOKENS)
    assert {value.shape[0] for value in inputs.values() if isinstance(value, Tensor)} == {ROWS}


@pytest.mark.parametrize(
    "config",
    [
        transformers.LEDConfig(encoder_layers=1, decoder_layers=1, max_decoder_position_embeddings=16),
        transformers.WhisperConfig(encoder_layers=1, decoder_layers=1, max_target_positions=16),
    ],
)
def test_a_decoder_gets_as_many_tokens_as_it_has_positions_for(config: PreTrainedConfig) -> None:
    config.architectures = [type(config).__name__.replace("Config", "ForConditionalGeneration")]
    inputs = step_inputs(build_meta(config), Size(ROWS, TOKENS))
    assert inputs["decoder_input_ids"].shape == inputs["decoder_attention_mask"].shape == (ROWS, 16)
    assert "input_ids" not in inputs or inputs["input_ids"].shape == (ROWS, TOKENS)


def to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


class Boxes(nn.Module):
    """Reads tokens and their boxes, which are optional by its signature and which it cannot do without."""

    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.config = PreTrainedConfig(vocab_size=64)
        self.weight = nn.Parameter(torch.ones(64, 4, device="meta"))

    def forward(self, input_ids: Tensor, attention_mask: Any = None, bbox: Any = None) -> Tensor:
        if attention_mask is not None and attention_mask.dim() == 2:
            raise ValueError("a mask of every token for every other is needed")
        return self.weight[input_ids] + bbox


def test_the_first_inputs_that_run_are_taken() -> None:
    inputs = step_inputs(Boxes(), Size(ROWS, TOKENS))
    assert inputs["bbox"].shape == (ROWS, TOKENS, 4)
    assert "attention_mask" not in inputs


def test_whole_numbers_have_values_and_large_images_take_no_memory() -> None:
    ids = step_inputs(Boxes(), Size(ROWS, TOKENS))["input_ids"]
    assert ids.device.type == "cpu"
    assert not {0, 1, 2, 3} & set(ids.flatten().tolist())
    assert step_inputs(build_meta(make_config("vit")), Size(10**6))["pixel_values"].is_meta


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (Wav2Vec2Config(num_hidden_layers=1), {"input_values": (ROWS, 161280)}),  # ten seconds
        (Qwen2VLVisionConfig(depth=1), {"hidden_states": (ROWS * 32 * 32, 1176), "grid_thw": (ROWS, 3)}),
    ],
    ids=["sound", "patches"],
)
def test_sounds_and_images_of_any_size_are_as_large_as_in_training(
    config: PreTrainedConfig, sizes: dict[str, tuple[int, ...]]
) -> None:
    inputs = step_inputs(build_meta(config), Size(ROWS))
    assert {name: inputs[name].shape for name in sizes} == sizes


def test_the_mask_of_several_codebooks_has_an_element_for_each_token() -> None:
    audio = {**_DIA, "cross_hidden_size": 32, "num_channels": 3}
    dia = transformers.DiaConfig(encoder_config=_DIA, decoder_config=audio, delay_pattern=[0, 1, 2])
    dia.architectures = ["DiaForConditionalGeneration"]
    inputs = step_inputs(build_meta(dia), Size(ROWS, TOKENS))
    assert inputs["decoder_input_ids"].shape == (ROWS, TOKENS, 3)
    assert inputs["decoder_attention_mask"].shape == (ROWS, TOKENS)


def test_without_inputs_that_run_the_likeliest_are_returned_for_their_error() -> None:
    broken = Boxes()
    broken.forward = lambda input_ids, attention_mask=None: 1 / 0  # type: ignore[assignment]
    assert set(step_inputs(broken, Size(ROWS, TOKENS))) == {"input_ids", "attention_mask"}


def test_a_model_without_a_config_is_refused() -> None:
    with pytest.raises(ModelError, match="no transformers config"):
        step_inputs(nn.Linear(2, 2), Size(1))
