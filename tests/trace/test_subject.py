"""The code that an answer names runs, and applies the recipe of the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import memopt
from memopt.pipeline import patch_checkpoint
from memopt.plan.recipe import load_recipe
from memopt.trace.subject import chosen_recipe, code_of, step_of
from memopt.trace.training import Request
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
    for name, said in (("LLaMAForCausalLM", True), ("LlamaForCausalLM", False), (None, False)):
        config.architectures = [name] if name else None
        config.save_pretrained(tmp_path)
        notes = step_of(Request(tmp_path)).notes
        assert (
            "The config names LLaMAForCausalLM, which is unknown here; counted is LlamaForCausalLM." in notes
        ) is said


def test_a_patched_folder_is_loaded_and_a_fold_is_written(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "stock")
    fold = typed(Request(tmp_path / "stock", recipe="exact"))
    assert fold == f"memopt.load of the folder that `memopt patch {tmp_path / 'stock'} --recipe exact` writes"
    patch_checkpoint(tmp_path / "stock", tmp_path / "patched", "exact")
    code = typed(Request(tmp_path / "patched", overrides=("loss.method=none",)))
    model = by_code(code, nn.Module())
    assert "1 loss: 1 left" in str(memopt.summary(model))
