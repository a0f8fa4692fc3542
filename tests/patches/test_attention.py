"""`attention.implementation`: set by transformers' own switch, refused with a reason, and given back."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import CLIPConfig, CLIPModel

import memopt
from memopt.pipeline import patch_checkpoint
from memopt.plan.recipe import Recipe, load_recipe
from memopt.trace.account import live_bytes
from memopt.verification.run import verify
from memopt.walk.models import attention as walk_attention
from tests.factories import tiny_inputs, tiny_model
from tests.support.compare import step_gradients


def recipe(implementation: str) -> Recipe:
    return load_recipe("exact-unfolded", [f"attention.implementation={implementation}"])


def set_to(model: nn.Module) -> str:
    return str(model.config._attn_implementation)


def gradients(model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    return step_gradients(model, tiny_inputs("llama"), seed)


def test_by_default_nothing_is_set_and_nothing_said() -> None:
    model = tiny_model("llama")
    memopt.patch(model)
    assert set_to(model) == "sdpa"
    assert "attention implementation" not in str(memopt.summary(model))


@pytest.mark.parametrize(("before", "after"), [("sdpa", "eager"), ("eager", "sdpa")])
def test_the_model_runs_what_the_recipe_says_and_computes_the_same(before: str, after: str) -> None:
    stock, patched = (tiny_model("llama", torch.float64) for _ in range(2))
    patched.load_state_dict(stock.state_dict())
    for model in (stock, patched):
        model.set_attn_implementation(before)
    memopt.patch(patched, recipe(after))
    assert set_to(patched) == after
    assert "1 attention implementation: 1 set" in str(memopt.summary(patched))
    expected = gradients(stock)
    for name, gradient in gradients(patched).items():
        # Eager attention rounds its probabilities to fp32, in each of two layers, forward and backward.
        error = (gradient - expected[name]).norm() / expected[name].norm()
        assert error <= 4 * torch.finfo(torch.float32).eps * 4
    memopt.unpatch(patched)
    assert set_to(patched) == before
    assert type(patched) is type(stock)


def test_softmaxes_of_the_attention_that_the_recipe_sets_are_recomputed() -> None:
    given, by_recipe = tiny_model("bert"), tiny_model("bert")
    given.set_attn_implementation("eager")
    memopt.patch(given)
    memopt.patch(by_recipe, recipe("eager"))
    steps = [functools.partial(lambda model: model(**tiny_inputs("bert")).loss, model) for model in (given, by_recipe)]
    for step in steps:
        step().backward()  # the first step exchanges linears
    assert live_bytes(steps[1]) == live_bytes(steps[0])
    memopt.unpatch(by_recipe)
    assert set_to(by_recipe) == "sdpa"


def test_a_folder_is_walked_with_the_attention_that_the_recipe_sets(tmp_path: Path) -> None:
    tiny_model("bert").save_pretrained(tmp_path / "stock")
    overrides = ("attention.implementation=eager",)
    in_memory = tiny_model("bert")
    memopt.patch(in_memory, recipe("eager"))
    assert "2 softmaxes: 2 recompute" in str(memopt.summary(in_memory))
    planned = memopt.plan_for(tmp_path / "stock", load_recipe("exact", overrides))
    written = patch_checkpoint(tmp_path / "stock", tmp_path / "out", overrides=overrides).plan
    assert len(planned.sites.softmaxes) == len(written.sites.softmaxes) == 2


def test_every_part_gets_its_own_setting_back() -> None:
    part = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = CLIPModel(
        CLIPConfig(text_config={**part, "vocab_size": 64}, vision_config={**part, "image_size": 8, "patch_size": 4})
    )
    model.vision_model.set_attn_implementation("eager")
    parts = (model, model.text_model, model.vision_model)
    before = [set_to(part) for part in parts]
    assert before == ["sdpa", "sdpa", "eager"]
    memopt.patch(model, recipe("eager"))
    assert [set_to(part) for part in parts] == ["eager"] * 3
    memopt.unpatch(model)
    assert [set_to(part) for part in parts] == before


def test_a_missing_package_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk_attention, "find_spec", lambda package: None)
    plan = memopt.plan_for(tiny_model("llama"), recipe("flash_attention_2"))
    [row] = [entry for entry in plan.entries if entry.kind == "attention"]
    assert (row.action, row.site) == ("keep", "")
    assert row.reason == "flash_attention_2 needs the package flash_attn or kernels, which is not installed"


def test_what_the_model_or_the_machine_cannot_run_is_refused_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(type(model), "_supports_flex_attn", False)
    memopt.patch(model, recipe("flex_attention"))
    assert set_to(model) == "sdpa"
    assert "its attention cannot be flex_attention" in str(memopt.summary(model))


def test_attention_dropout_draws_the_same_numbers_when_a_checkpointed_block_runs_again() -> None:
    plain, checkpointed = (tiny_model("llama", torch.float64, attention_dropout=0.5).train() for _ in range(2))
    checkpointed.load_state_dict(plain.state_dict())
    memopt.patch(plain, recipe("eager"))
    memopt.patch(
        checkpointed, load_recipe("exact-unfolded", ["attention.implementation=eager", "checkpointing.method=full"])
    )
    expected = gradients(plain)
    for name, gradient in gradients(checkpointed).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)
    other = gradients(plain, seed=1)
    assert any(not torch.allclose(other[name], each) for name, each in expected.items())


@pytest.mark.rotates(3)
def test_a_folder_whose_attention_is_set_is_verified(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "stock")
    patch_checkpoint(tmp_path / "stock", tmp_path / "patched", recipe("eager"))
    verdict = verify(tmp_path / "patched", against=tmp_path / "stock")
    assert verdict.status == "pass", [check for check in verdict.checks if check.status != "pass"]
    assert set_to(memopt.load(tmp_path / "patched")) == "eager"


@pytest.mark.skipif(torch.cuda.is_available(), reason="flex attention trains on a GPU")
def test_what_this_machine_cannot_run_is_said_where_it_is_verified(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "stock")
    patch_checkpoint(tmp_path / "stock", tmp_path / "patched", recipe("flex_attention"))
    [check] = verify(tmp_path / "patched", level="memory").checks
    assert check.status == "skip"
    assert "this machine cannot run the model: FlexAttention does not support backward on CPU" in check.detail
