"""The code that an answer names runs, and applies the recipe of the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import memopt
from memopt.pipeline import patch_checkpoint
from memopt.plan.recipe import load_recipe
from memopt.prediction.subject import chosen_recipe, code_of, step_of
from memopt.trace.training import Precision, Request
from tests.factories import tiny_model


def typed(request: Request) -> str:
    return code_of(request, chosen_recipe(request))


def by_code(code: str, model: nn.Module, **names: Any) -> nn.Module:
    patched: nn.Module = eval(code, {"memopt": memopt, "model": model, **names})
    return patched


SETTINGS = ("loss.method=none", "norms.method=none")


@pytest.mark.parametrize("recipe", [None, "exact-unfolded", "exact-levels", "a file", "an object"])
@pytest.mark.parametrize("settings", [(), SETTINGS])
def test_the_code_applies_the_recipe_of_the_request(recipe: str | None, settings: Any, tmp_path: Path) -> None:
    given: Any = recipe
    if recipe == "a file":
        given = tmp_path / "my plan.yaml"
        given.write_text("name: mine\nnorms: {method: share, fold: none}\n")
    elif recipe == "an object":
        given = load_recipe("exact-levels", ["gated_mlps.method=none"])
    request = Request("a model", recipe=given, overrides=settings)
    ours = by_code(typed(request), tiny_model("llama"), recipe=given)
    expected = memopt.patch(tiny_model("llama"), load_recipe(given or "exact-unfolded", settings))
    assert str(memopt.summary(ours)) == str(memopt.summary(expected))
    assert [type(each) for each in ours.modules()] == [type(each) for each in expected.modules()]


def test_another_class_than_the_config_names_is_said(tmp_path: Path) -> None:
    config = tiny_model("llama").config
    for name, said in (("LLaMAForCausalLM", True), ("BertModel", False), ("LlamaForCausalLM", False), (None, False)):
        config.architectures = [name] if name else None
        config.save_pretrained(tmp_path)
        notes = step_of(Request(tmp_path)).notes
        assert (
            "The config names LLaMAForCausalLM, which is unknown here; counted is LlamaForCausalLM." in notes
        ) is said
        other = "The config names BertModel, which does not take this config; counted is LlamaForCausalLM."
        assert (other in notes) is (name == "BertModel")


def test_a_patched_folder_is_loaded_and_a_fold_is_written(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "stock")
    fold = typed(Request(tmp_path / "stock", recipe="exact"))
    assert fold == f"memopt.load of the folder that `memopt patch {tmp_path / 'stock'} --recipe exact` writes"
    patch_checkpoint(tmp_path / "stock", tmp_path / "patched", "exact")
    code = typed(Request(tmp_path / "patched", overrides=("loss.method=none",)))
    model = by_code(code, nn.Module())
    assert "1 loss: 1 left" in str(memopt.summary(model))


def test_sites_are_those_of_a_model_in_the_dtype_of_the_step(tmp_path: Path) -> None:
    """In 16 bits the indices of a pooling are most of what its function saves."""
    config = transformers.Sam2HieraDetConfig(
        hidden_size=16, num_attention_heads=1, blocks_per_stage=[1, 1], embed_dim_per_stage=[16, 32],
        num_attention_heads_per_stage=[1, 2], window_size_per_stage=[4, 4], global_attention_blocks=[],
        image_size=[64, 64], window_positional_embedding_background_size=[4, 4], num_query_pool_stages=1,
        architectures=["Sam2HieraDetModel"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    dtypes: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
    for precision, dtype in dtypes.items():
        model = transformers.models.sam2.modeling_sam2.Sam2HieraDetModel(config).to(dtype)
        sites = step_of(Request(tmp_path, precision=precision)).sites
        assert sites.functions == memopt.plan_for(model).sites.functions
        assert bool(sites.functions) == (dtype == torch.bfloat16)


def test_a_norm_counts_as_folded_only_if_the_files_have_all_its_weights(tmp_path: Path) -> None:
    """Files have each expert by itself, and a load stacks them."""
    config = transformers.OlmoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, pad_token_id=0,
    )  # fmt: skip
    transformers.OlmoeForCausalLM(config).save_pretrained(tmp_path / "stock")
    written = patch_checkpoint(tmp_path / "stock", tmp_path / "patched", recipe="exact")
    folded = step_of(Request(tmp_path / "stock", recipe="exact", seq=24)).folded
    assert folded == {norm.name for norm in written.plan.folds()}
    assert folded
