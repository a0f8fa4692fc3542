"""Small configs of the same class."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import transformers
from torch import nn
from transformers import PreTrainedConfig

from memopt.walk.calls.inputs import runnable_calls
from memopt.walk.models.build import build_meta
from memopt.walk.models.config import config_nodes
from memopt.walk.models.shrink.config import (
    LARGE_PARAMETERS,
    MAX_PARAMETERS,
    VOCABULARY,
    ShrinkError,
    _cut_experts,
    shrunken,
)
from memopt.walk.models.shrink.depth import with_depth
from memopt.walk.models.shrink.width import decide_widths, fit_sections, scale_widths
from tests.walk.configs import FAMILIES, llama_70b, make_config, shrink, tiny_llama, twin


def _token_ids(config: PreTrainedConfig) -> list[int]:
    found: list[int] = []
    for node in config_nodes(config):
        for name, value in vars(node).items():
            if name.endswith(("_token_id", "_token_index")):
                found += [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)]
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.rotates(3)
def test_every_family_becomes_small_and_still_builds(family: str) -> None:
    assert sum(parameter.numel() for parameter in twin(family).parameters()) < 6e6 < MAX_PARAMETERS


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_keeps_more_than_one_layer(family: str) -> None:
    stacks = [module for module in twin(family).modules() if isinstance(module, nn.ModuleList)]
    # ALBERT runs its only layer more than once.
    assert family == "albert" or max(len(stack) for stack in stacks) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_token_ids_stay_in_the_vocabulary(family: str) -> None:
    assert all(token < VOCABULARY for token in _token_ids(twin(family).config))


def test_the_given_config_is_not_changed() -> None:
    config = make_config("qwen2_vl")
    before = copy.deepcopy(config.to_dict())
    shrink(config)
    assert config.to_dict() == before


def test_a_tiny_config_is_kept() -> None:
    config = tiny_llama()
    small = shrink(config)
    assert small is not config
    assert small.to_dict() == config.to_dict()


def test_equal_token_ids_stay_equal_and_different_ones_different() -> None:
    config = make_config("gpt2", bos_token_id=50256, eos_token_id=50256, pad_token_id=50000)
    small = shrink(config)
    assert small.bos_token_id == small.eos_token_id != small.pad_token_id


@pytest.mark.parametrize(
    ("heads", "key_value_heads", "expected"), [(32, 32, "multi-head"), (32, 8, "grouped"), (32, 1, "multi-query")]
)
def test_the_kind_of_attention_stays(heads: int, key_value_heads: int, expected: str) -> None:
    small = shrink(make_config("llama", num_attention_heads=heads, num_key_value_heads=key_value_heads))
    sharing = small.num_attention_heads // small.num_key_value_heads
    kind = "multi-head" if sharing == 1 else "multi-query" if small.num_key_value_heads == 1 else "grouped"
    assert kind == expected


def test_hidden_size_stays_heads_times_head_size() -> None:
    small = shrink(llama_70b())
    assert small.hidden_size == small.num_attention_heads * small.head_dim


def test_a_head_size_of_its_own_stays_one() -> None:
    small = shrink(make_config("qwen3"))
    assert small.hidden_size != small.num_attention_heads * small.head_dim


def test_depth_shows_every_kind_of_layer() -> None:
    config = make_config("gemma3")
    small = shrink(config)
    assert set(small.layer_types) == set(config.layer_types)
    assert len(small.layer_types) == small.num_hidden_layers < config.num_hidden_layers


def test_the_first_layers_are_the_ones_kept() -> None:
    config = make_config("gemma2")
    small = shrink(config)
    assert small.layer_types == config.layer_types[: small.num_hidden_layers]


def test_layers_that_a_config_lists_without_a_count_are_cut() -> None:
    kinds = ["linear_attention", "moe", "linear_attention", "full_attention", "mlp"]
    config = transformers.NemotronHConfig(layers_block_type=kinds * 10)
    assert "num_hidden_layers" not in vars(config)
    assert shrink(config).layers_block_type == kinds


def test_dense_layers_before_the_sparse_ones_are_kept() -> None:
    small = shrink(transformers.DeepseekV3Config())
    assert small.num_hidden_layers == small.first_k_dense_replace + 1


def test_experts_are_few_and_routable() -> None:
    small = shrink(transformers.DeepseekV3Config())
    assert small.num_experts_per_tok < small.n_routed_experts <= 8
    assert small.n_routed_experts % small.n_group == 0


def test_rotary_sections_follow_the_head_size() -> None:
    small = shrink(make_config("qwen2_vl")).text_config
    head_dim = small.hidden_size // small.num_attention_heads
    assert sum(small.rope_parameters["mrope_section"]) == head_dim // 2


def test_rotary_sections_that_the_class_gives_follow_the_head_size() -> None:
    small = shrink(transformers.Glm4vTextConfig())
    head_dim = small.hidden_size // small.num_attention_heads
    assert sum(small.rope_parameters["mrope_section"]) == head_dim // 2


@pytest.mark.parametrize(("total", "expected"), [(32, [8, 12, 12]), (16, [4, 6, 6]), (11, [3, 4, 4])])
def test_sections_keep_their_proportions(total: int, expected: list[int]) -> None:
    assert fit_sections([8, 12, 12], total) == expected


def test_the_rotary_part_of_a_head_follows_the_head_size() -> None:
    small = shrink(transformers.DeepseekV2Config())
    assert small.head_dim == small.qk_rope_head_dim < 64
    assert small.qk_head_dim == small.qk_nope_head_dim + small.qk_rope_head_dim


def test_heads_of_a_state_space_make_up_its_inner_width() -> None:
    small = shrink(transformers.FalconH1Config())
    assert small.mamba_d_ssm == small.mamba_n_heads * small.mamba_d_head < 1024
    small = shrink(transformers.Zamba2Config())
    assert small.n_mamba_heads * small.mamba_headdim == small.mamba_expand * small.hidden_size


def test_heads_of_linear_attention_are_as_few_as_the_others() -> None:
    node = PreTrainedConfig(hidden_size=512, num_attention_heads=16, linear_num_heads=16)
    scale_widths(node, decide_widths(node, {}, keep_head_dim=False))
    assert node.linear_num_heads == node.num_attention_heads == 4


def test_a_number_of_experts_a_token_that_is_left_open_is_given() -> None:
    assert shrink(transformers.DeepseekV2Config(num_experts_per_tok=None)).num_experts_per_tok == 2


class _RenamedGroups(PreTrainedConfig):
    attribute_map: ClassVar[dict[str, str]] = {"n_group": "num_expert_group"}


def test_groups_of_experts_are_few_whatever_they_are_called() -> None:
    node = _RenamedGroups(num_experts=64, num_expert_group=8)
    _cut_experts(node)
    assert (node.num_experts, node.num_expert_group) == (8, 2)


def test_a_backbone_gives_as_many_outputs_of_fewer_layers() -> None:
    small = shrink(transformers.Dinov2Config(out_indices=[3, 6, 9, 12]))
    assert small.num_hidden_layers == 4
    assert small.out_indices == [1, 2, 3, 4]
    assert small.out_features == ["stage1", "stage2", "stage3", "stage4"]
    assert len(small.stage_names) == 5


def test_key_value_heads_of_every_layer_follow_the_heads() -> None:
    node = PreTrainedConfig(hidden_size=512, num_attention_heads=16, num_key_value_heads_per_layer=[16, 8, 1])
    scale_widths(node, decide_widths(node, {}, keep_head_dim=False))
    assert node.num_key_value_heads_per_layer == [4, 2, 1]


def test_a_prompt_encoder_follows_the_image_and_the_width() -> None:
    small = shrink(transformers.SamConfig())
    prompt, vision = small.prompt_encoder_config, small.vision_config
    assert prompt.image_embedding_size == prompt.image_size // prompt.patch_size == 8
    assert 2 * vision.num_pos_feats == vision.output_channels == prompt.hidden_size


def test_channels_end_in_the_width_of_the_tower_behind_them() -> None:
    links = {1024: 128}
    node = PreTrainedConfig(hidden_size=768, num_attention_heads=12, downsample_channels=[512, 1024])
    scale_widths(node, decide_widths(node, links, keep_head_dim=False))
    assert node.downsample_channels == [512, 128]


def test_forms_that_are_not_quite_small_come_last() -> None:
    config = make_config("bert", hidden_size=512, num_attention_heads=8, intermediate_size=2048, vocab_size=16000)
    sizes = [sum(p.numel() for p in build_meta(small).parameters()) for small in shrunken(config)]
    assert max(sizes[:-1]) < MAX_PARAMETERS < sizes[-1] < LARGE_PARAMETERS


def test_rotary_factors_have_one_entry_a_frequency() -> None:
    small = shrink(make_config("phi3"))
    assert len(small.rope_parameters["long_factor"]) == small.hidden_size // small.num_attention_heads // 2


def test_a_window_is_shorter_than_the_inputs() -> None:
    assert 1 < shrink(make_config("mistral")).sliding_window < 16


def test_towers_that_are_joined_still_fit() -> None:
    small = shrink(make_config("qwen2_vl"))
    assert small.vision_config.hidden_size == small.text_config.hidden_size


def test_lists_with_one_entry_a_layer_follow_the_depth() -> None:
    config = transformers.Gemma3nTextConfig()
    small = shrink(config)
    assert len(small.intermediate_size) == len(small.activation_sparsity_pattern) == small.num_hidden_layers


def test_the_strongest_recipe_comes_first() -> None:
    def parameters(config: PreTrainedConfig) -> int:
        return sum(parameter.numel() for parameter in build_meta(config).parameters())

    sizes = [parameters(config) for config in shrunken(make_config("bert"))]
    assert len(sizes) > 1
    assert sizes[0] == min(sizes)


def test_says_why_nothing_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("this make cannot be small")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", refuse)
    with pytest.raises(ShrinkError, match=r"'llama' has no small form that builds.*this make cannot be small"):
        shrink(make_config("llama"))


def test_a_pyramid_keeps_its_stages_and_each_has_fewer_layers() -> None:
    config = transformers.ConvNextConfig()
    cut = with_depth(config, 3)
    assert cut.num_stages == 4
    assert tuple(cut.depths) == (2, 2, 2, 2)
    assert cut.stage_names == config.stage_names
    calls = runnable_calls(build_meta(cut), variants=("plain",))
    assert [call.label for call in calls] == ["plain"]
