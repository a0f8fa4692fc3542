"""Default configs, made complete."""

from __future__ import annotations

import pytest
import transformers
from transformers import PreTrainedConfig

from memopt.errors import ModelError
from memopt.walk.models.build import instantiate
from memopt.walk.models.shrink.depth import with_depth
from tests.zoo.config import complete, complete_for_runs, default_config


def _filled(config: PreTrainedConfig) -> PreTrainedConfig:
    """`config`, filled until its model builds, two layers of it."""
    for _ in range(10):
        failure = _failure(config)
        if not failure:
            return config
        assert complete(config, failure), failure
    raise AssertionError("it does not end")


def _failure(config: PreTrainedConfig) -> str:
    try:
        instantiate(with_depth(config, 2), device="meta")
    except ModelError as error:
        return error.message
    return ""


def test_a_part_of_any_type_is_of_the_family_where_it_has_such_a_part() -> None:
    assert default_config("colpali").vlm_config is not None
    assert default_config("bert").model_type == "bert"


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("ministral", "head_dim", 128),
        ("nemotron", "num_key_value_heads", 48),
        ("esm", "vocab_size", 512),
        ("informer", "prediction_length", 16),
        ("dots1", "num_experts_per_tok", 2),
        ("t5gemma2_text", "dropout_rate", 0.0),
    ],
)
def test_an_empty_field_is_filled_by_what_its_name_says(model_type: str, field: str, value: object) -> None:
    config = default_config(model_type)
    assert getattr(config, field, None) is None
    assert getattr(_filled(config), field) == value


def test_a_window_that_only_runs_read_is_filled_for_them() -> None:
    config = _filled(default_config("step3p5"))
    assert config.sliding_window is None
    assert complete_for_runs(config)
    assert config.sliding_window == 8
    assert not complete_for_runs(default_config("bert"))


def test_layers_of_two_kinds_alternate() -> None:
    kinds = _filled(default_config("lfm2_moe")).layer_types
    assert kinds[:3] == ["conv", "full_attention", "conv"]
    assert len(kinds) == default_config("lfm2_moe").num_hidden_layers


def test_each_kind_of_layer_gets_rotary_parameters() -> None:
    rotary = _filled(default_config("cohere_compass_text")).rope_parameters
    assert rotary["full_attention"]["rope_type"] == "default"


def test_tuples_become_lists_as_in_a_file() -> None:
    assert _filled(default_config("vitmatte")).fusion_hidden_sizes == [256, 128, 64, 32]


def test_a_config_that_fails_for_another_reason_is_left() -> None:
    config = transformers.BertConfig(num_attention_heads=7)
    before = config.to_dict()
    assert not complete(config, _failure(config))
    assert config.to_dict() == before


def test_reads_are_not_watched_afterwards() -> None:
    stock = PreTrainedConfig.__getattribute__
    complete(transformers.BertConfig(), "")
    assert PreTrainedConfig.__getattribute__ is stock


def test_sections_of_rotary_positions_that_the_defaults_lack_are_filled_for_runs() -> None:
    config = transformers.CONFIG_MAPPING["hunyuan_vl_text"](hidden_size=64, num_attention_heads=2)
    assert complete_for_runs(config)
    assert config.rope_parameters["mrope_section"] == [4, 4, 4, 4]
    assert not complete_for_runs(transformers.LlamaConfig())
