"""Traces of models whose attention is FlashAttention or flex attention, whose packages may be missing here."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import memopt
from memopt.errors import ModelError
from memopt.plan.recipe import load_recipe
from memopt.prediction.subject import step_of
from memopt.trace.events import Storage, Trace, peak_of
from memopt.trace.trace import trace, trace_account
from memopt.trace.training import Request, Step, Training
from tests.trace.builders import named_config, sites_of
from tests.zoo.build import small_config

SEQ = 320
FUSED = ("flash_attention_2", "flash_attention_3", "flex_attention")


def gpt_oss() -> PreTrainedConfig:
    config = transformers.GptOssConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=131072,
    )  # fmt: skip
    config.architectures = ["GptOssForCausalLM"]
    return config


def traced(config: PreTrainedConfig, *settings: str, **training: Any) -> Trace:
    recipe = load_recipe("exact-unfolded", settings) if settings else None
    return trace(Step(config, Training(2, SEQ, **training), sites_of(config), recipe))


def storages(found: Trace) -> set[Storage]:
    return {event.storage for event in found.events}


def squares(found: Trace) -> int:
    return sum(each.shape[-2:] == (SEQ, SEQ) and each.dtype != "bool" for each in storages(found))


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
@pytest.mark.parametrize("settings", [(), ("checkpointing.method=full", "checkpointing.keep=attention")])
@pytest.mark.parametrize("name", ["llama", "vit"])
@pytest.mark.rotates(3)
def test_each_saves_what_the_fused_operator_of_pytorch_saves(name: str, settings: Any, precision: Any) -> None:
    config = named_config(name, max_position_embeddings=SEQ)
    recipe = load_recipe("exact-unfolded", settings) if settings else None
    found = []
    for attention in (None, *FUSED):
        training = Training(2, SEQ if name == "llama" else None, precision=precision, attention=attention)
        found.append(trace_account(Step(config, training, sites_of(config), recipe)).total)
    assert found[:3] == [found[0]] * 3
    # Flex attention draws no random numbers, so it saves no seed (16 bytes) and no offset (8) in each of two layers.
    assert settings or found[0] - found[3] == 2 * (16 + 8)


@pytest.mark.parametrize("implementation", FUSED)
@pytest.mark.parametrize(
    "config", [named_config("gemma2", max_position_embeddings=SEQ), gpt_oss()], ids=["gemma2", "gpt-oss"]
)
def test_no_tensor_has_tokens_by_tokens(config: PreTrainedConfig, implementation: Any) -> None:
    assert squares(traced(config)) > 0
    found = traced(config, attention=implementation)
    assert squares(found) == 0
    assert any(f"Attention: {implementation}" in note for note in found.notes)


def test_the_setting_of_a_recipe_is_traced_without_its_package() -> None:
    config = named_config("gemma2", max_position_embeddings=SEQ)
    by_recipe = traced(config, "attention.implementation=flash_attention_2")
    assert squares(by_recipe) == 0
    assert not any("unchanged" in note for note in by_recipe.notes)
    by_option = traced(config, "attention.implementation=keep", attention="flash_attention_2")
    assert peak_of((), by_recipe.events).nbytes == peak_of((), by_option.events).nbytes


def test_sinks_are_counted() -> None:
    found = traced(gpt_oss(), attention="flex_attention")
    # One number for each row of each head, concatenated with its sink: in bf16, for two layers.
    assert sum(each.shape == (2, 4, SEQ, 2) and each.dtype == "bfloat16" for each in storages(found)) >= 2


def test_products_are_as_many_as_of_flash_attention() -> None:
    config = named_config("llama", max_position_embeddings=SEQ)
    flash, flex = (traced(config, attention=each) for each in ("flash_attention_2", "flex_attention"))
    assert sum(each.flops for each in flex.operations) == sum(each.flops for each in flash.operations)


@pytest.mark.parametrize(
    ("name", "settings", "training", "said"),
    [
        (
            "gemma2",
            {},
            {"attention": "sdpa"},
            "Gemma2ForCausalLM cannot be sdpa: Gemma2ForCausalLM does not support it",
        ),
        (
            "llama",
            {},
            {"attention": "flash_attention_2", "precision": "fp32"},
            "16-bit tensors, and the precision is fp32",
        ),
        ("llama", {"head_dim": 512}, {"attention": "flash_attention_2"}, "a width up to 256, not 512"),
        (
            "llama",
            {"attention_dropout": 0.1},
            {"attention": "flex_attention"},
            "Flex attention has no dropout, .* Use ano",
        ),
    ],
)
def test_what_cannot_run_is_an_error(name: str, settings: Any, training: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        traced(named_config(name, max_position_embeddings=SEQ, **settings), **training)


def test_transformers_is_as_before_afterwards() -> None:
    before = {name: ALL_ATTENTION_FUNCTIONS[name] for name in FUSED}
    mask = ALL_MASK_ATTENTION_FUNCTIONS["flex_attention"]
    traced(named_config("llama", max_position_embeddings=SEQ), attention="flex_attention")
    assert {name: ALL_ATTENTION_FUNCTIONS[name] for name in FUSED} == before
    assert ALL_MASK_ATTENTION_FUNCTIONS["flex_attention"] is mask


@pytest.mark.parametrize("request_", [{"attention": "eager"}, {"overrides": ("attention.implementation=eager",)}])
def test_softmaxes_of_eager_attention_are_found_where_the_model_would_run_another(tmp_path: Any, request_: Any) -> None:
    named_config("bert").save_pretrained(tmp_path)
    assert step_of(Request(str(tmp_path))).sites.softmaxes == ()
    assert len(step_of(Request(str(tmp_path), **request_)).sites.softmaxes) == 2


def test_the_answer_takes_it(tmp_path: Any) -> None:
    named_config("gemma2", max_position_embeddings=SEQ).save_pretrained(tmp_path)
    eager, flash = (memopt.fit(tmp_path, seq=SEQ, attention=each) for each in (None, "flash_attention_2"))
    assert flash.stock.peak < eager.stock.peak
    assert "attention by flash_attention_2" in str(flash)


@pytest.mark.parametrize("by_recipe", [False, True])
def test_parts_with_a_copy_of_the_config_are_switched_too(by_recipe: bool) -> None:
    config, name = small_config("t5")
    config.architectures = [name]
    eager = load_recipe("exact-unfolded", ["attention.implementation=eager"]) if by_recipe else None
    training = Training(2, 8, attention=None if by_recipe else "eager")
    operations = {each.operation for each in storages(trace(Step(config, training, sites_of(config), eager)))}
    assert "_softmax" in operations
    assert not any(each.startswith("_scaled_dot_product") for each in operations)


def test_each_part_is_traced_with_the_attention_that_it_is_loaded_with() -> None:
    config, name = small_config("depth_anything")  # its backbone can run SDPA, and the class around it cannot
    config.architectures = [name]
    found = trace(Step(config, Training(2, None), sites_of(config), None))
    assert not any("softmax" in each.operation for each in storages(found))
    (note,) = (note for note in found.notes if note.startswith("Attention: "))
    assert note.startswith("Attention: eager, ")
    assert "; in backbone the kernel that scaled_dot_product_attention chooses" in note
