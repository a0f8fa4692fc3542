"""Sizes that are neither widths nor depth: cut where a config has no light form that runs without."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers import PreTrainedConfig

from memopt.walk.models.build import instantiate
from memopt.walk.models.shrink.config import LIGHT_PARAMETERS, MAX_PARAMETERS, shrunken
from memopt.walk.models.shrink.rest import cut_rest
from memopt.walk.models.shrink.width import halved
from tests.walk.configs import make_config, shrink


def _size(config: PreTrainedConfig) -> int:
    return sum(parameter.numel() for parameter in instantiate(config, device="meta").parameters())


def _cut(links: dict[int, int] | None = None, **fields: Any) -> PreTrainedConfig:
    node = PreTrainedConfig(**fields)
    cut_rest([node], [dict(vars(node))], {} if links is None else links)
    return node


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("encoder_hash_byte_group_vocab", 500002, 512),
        ("q_lora_rank", 1536, 48),
        ("v_head_dim", 128, 32),
        ("qk_rope_head_dim", 64, 64),
        ("index_n_heads", 64, 4),
        ("linear_num_key_value_heads", 64, 2),
        ("num_self_attends_per_block", 26, 2),
        ("first_dense_layers", 3, 3),
        ("projector_hidden_size", 4096, 128),
        ("image_size", 1024, 1024),
        ("feature_projection_input_dim", 160, 160),
    ],
)
def test_a_size_is_cut_by_what_its_name_says(field: str, value: int, expected: int) -> None:
    assert getattr(_cut(**{field: value}), field) == expected


def test_equal_widths_become_equal_ones_and_known_ones_follow() -> None:
    node = _cut({768: 96}, out_hidden_size=4096, projector_hidden_size=4096, text_hidden_dim=768)
    assert (node.out_hidden_size, node.projector_hidden_size, node.text_hidden_dim) == (128, 128, 96)


def test_what_was_decided_before_is_left() -> None:
    node = PreTrainedConfig(projector_hidden_size=512)
    cut_rest([node], [{"projector_hidden_size": 4096}], {})
    assert node.projector_hidden_size == 512


def test_widths_of_stages_stay_multiples_of_their_heads() -> None:
    node = _cut(embed_dim=[128, 256, 512, 1024], num_heads=[4, 8, 16, 32])
    assert node.embed_dim == [16, 32, 64, 128]
    assert _cut(embed_dim=[96, 192, 384], num_heads=[48, 96, 192]).embed_dim == [48, 96, 192]


def test_a_width_that_is_halved_from_stage_to_stage_stays_wide_enough() -> None:
    node = _cut(upsampling_ratios=[8, 5, 4, 2, 2, 2], initial_channels=1536, num_filters=32)
    assert node.initial_channels // 2**6 >= 2
    assert node.num_filters == 4


def test_a_group_a_channel_stays_one() -> None:
    node = _cut({512: 128}, upsample_groups=512)
    assert node.upsample_groups == 128


def test_a_head_is_as_large_as_its_parts() -> None:
    assert _cut(qk_nope_head_dim=128, qk_rope_head_dim=64, qk_head_dim=192).qk_head_dim == 32 + 64


def test_a_network_scaled_by_coefficients_takes_its_basic_size() -> None:
    small = shrink(transformers.EfficientNetConfig())
    assert (small.width_coefficient, small.depth_coefficient, small.hidden_dim) == (1.0, 1.0, 1280)
    assert small.in_channels == transformers.EfficientNetConfig().in_channels


def test_tables_of_no_ordinary_form_do_not_keep_a_model_large() -> None:
    small = shrink(transformers.BltConfig())
    assert sum(p.numel() for p in instantiate(small, device="meta").parameters()) < MAX_PARAMETERS


def test_comes_after_forms_that_keep_more() -> None:
    names = [config.max_position_embeddings for config in shrunken(make_config("bert", max_position_embeddings=2000))]
    assert names[:2] == [2000, 2000]
    assert 1024 in names


def test_light_forms_come_before_heavy_ones() -> None:
    sizes = [_size(config) for config in shrunken(transformers.ZoeDepthConfig())]
    light = [size <= LIGHT_PARAMETERS for size in sizes]
    assert any(light)
    assert light == sorted(light, reverse=True)


def test_a_backbone_keeps_the_layers_whose_outputs_are_read() -> None:
    small = shrink(transformers.DepthAnythingConfig())
    backbone = small.backbone_config
    assert len(backbone.out_indices) == len(small.neck_hidden_sizes)
    assert backbone.num_hidden_layers == len(backbone.stage_names) - 1


def test_the_width_of_the_first_stage_follows_the_list_of_widths() -> None:
    small = shrink(transformers.Sam2HieraDetConfig())
    assert small.hidden_size == small.embed_dim_per_stage[0] < 96


def test_features_that_have_a_width_of_another_field_follow_it() -> None:
    node = _cut(fusion_hidden_size=256, bottleneck_features=256, num_features=7)
    assert (node.fusion_hidden_size, node.bottleneck_features, node.num_features) == (128, 128, 7)


def test_layers_that_need_a_second_of_their_kind_get_it() -> None:
    kinds = shrink(transformers.ZambaConfig()).layers_block_type
    assert kinds.count("hybrid") > 1


@pytest.mark.parametrize(("value", "expected"), [(1024, 128), (96, 96), (1028, 514), (129, 129)])
def test_halving_stops_at_odd_halves(value: int, expected: int) -> None:
    assert halved(value, 128) == expected


def test_images_of_convolutions_become_smaller_and_those_of_patches_by_whole_patches() -> None:
    assert shrink(transformers.EfficientNetConfig(image_size=600)).image_size == 150
    assert shrink(transformers.TextNetConfig()).image_size == (160, 160)
    assert shrink(transformers.Dinov2Config(image_size=518, patch_size=14)).image_size == 8 * 14


def test_images_with_two_sides_become_smaller_with_what_counts_their_features() -> None:
    assert shrink(transformers.SegGptConfig()).image_size == (448, 224)
    small = shrink(transformers.Sam2VisionConfig())
    side = small.backbone_config.image_size[0]
    assert side < 1024
    assert small.backbone_feature_sizes == [[side // stride] * 2 for stride in (4, 8, 16)]
