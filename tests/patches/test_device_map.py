"""accelerate's device maps: hooks around every module, which move tensors between devices."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn

import memopt
from memopt.patches.loss.lazy import LazyLogits
from memopt.trace.account import live_bytes
from tests.factories import tiny_inputs, tiny_model

MAP = dict.fromkeys(("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head"), "cpu")


def dispatched(model: nn.Module) -> Any:
    return dispatch_model(model, MAP, main_device="cpu", force_hooks=True)


Run = tuple[float, dict[str, torch.Tensor], int]


def run(model: Any) -> Run:
    """Loss, gradients, and bytes that a forward leaves behind."""
    inputs = tiny_inputs("llama", 2, 16)
    loss = model(**inputs).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients, live_bytes(lambda: model(**inputs).loss)


@pytest.mark.parametrize("overrides", [(), ("linears.recompute=mlp",)], ids=["exact", "outputs"])
def test_patching_before_and_behind_the_hooks_are_one(overrides: tuple[str, ...]) -> None:
    recipe = memopt.load_recipe("exact-unfolded", ("loss.method=none", *overrides))
    stock = run(dispatched(tiny_model("llama", use_cache=False)))
    first = run(dispatched(memopt.patch(tiny_model("llama", use_cache=False), recipe)))
    behind = memopt.patch(dispatched(tiny_model("llama", use_cache=False)), recipe)
    found = run(behind)
    assert found[0] == first[0] == pytest.approx(stock[0], rel=1e-6)
    assert all(torch.equal(first[1][name], gradient) for name, gradient in found[1].items())
    assert found[1].keys() == stock[1].keys()
    assert found[2] == first[2] < 0.6 * stock[2]
    behind.zero_grad()
    undone = run(memopt.unpatch(behind))
    assert undone[2] == stock[2]
    assert all(torch.equal(stock[1][name], gradient) for name, gradient in undone[1].items())


@pytest.mark.parametrize("recipe", ["exact-unfolded", "exact-levels"])
def test_a_model_whose_block_lies_on_disk_trains_as_stock(recipe: str, tmp_path: Path) -> None:
    places = {**MAP, "model.layers.0": "cpu", "model.layers.1": "disk"}
    del places["model.layers"]
    found = []
    for is_patched in (False, True):
        model = tiny_model("llama", use_cache=False)
        dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
        if is_patched:
            memopt.patch(model, recipe)
        loss = model(**tiny_inputs("llama", 2, 16)).loss
        loss.backward()
        found.append((loss.detach(), model.model.layers[0].mlp.up_proj.weight.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("when", ["before", "behind"])
def test_hooks_that_move_tensors_leave_the_loss_in_parts(when: str) -> None:
    model = tiny_model("llama", use_cache=False).train()
    model = dispatched(memopt.patch(model)) if when == "before" else memopt.patch(dispatched(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = model(**tiny_inputs("llama", 2, 16))
    assert isinstance(found.logits, LazyLogits)
    assert found.logits.value is None


def test_a_hook_that_does_more_leaves_the_logits_whole() -> None:
    class Doubles(ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return 2 * output

    stock, ours = (tiny_model("llama", use_cache=False).train() for _ in range(2))
    for model in (stock, memopt.patch(ours)):
        add_hook_to_module(model.lm_head, Doubles())
    with pytest.warns(UserWarning, match="computed whole, since the forward of their head was replaced"):
        found = run(ours)
    assert found[0] == pytest.approx(run(stock)[0], rel=1e-6)


def test_a_forward_of_somebody_else_stays_inside_the_hooks() -> None:
    def doubled(model: Any) -> Any:
        norm = model.model.layers[0].input_layernorm
        norm.forward = lambda x: 2 * type(norm).forward(norm, x)
        return dispatched(model)

    stock = run(doubled(tiny_model("llama", use_cache=False)))
    model = doubled(tiny_model("llama", use_cache=False))
    for _ in range(2):  # and the second patch finds the hooks as the first did
        with pytest.warns(UserWarning, match="input_layernorm: it does not compute the norm that its site describes"):
            memopt.patch(model, "exact-unfolded")
        found = run(model)
        assert found[0] == pytest.approx(stock[0], rel=1e-6)
        assert found[2] < 0.7 * stock[2]
        memopt.unpatch(model)
        model.zero_grad()


def test_what_is_offloaded_is_left_and_the_rest_trains_as_in_stock(tmp_path: Path) -> None:
    tiny_model("llama", use_cache=False).save_pretrained(tmp_path / "stock")
    memopt.patch_checkpoint(tmp_path / "stock", tmp_path / "patched")
    parts = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb"), "cpu")
    places = {**parts, "lm_head": "cpu", "model.layers.1": "disk"}
    options: Any = {"device_map": places, "offload_folder": tmp_path / "disk"}
    stock = run(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "patched", **options).train())
    with pytest.warns(UserWarning, match=r"layers\.1\.input_layernorm, .*: accelerate loads its weights"):
        model = memopt.load(tmp_path / "patched", overrides=("loss.method=none",), **options)
    found = run(model.train())
    assert found[0] == pytest.approx(stock[0], rel=1e-6)
    folded = {f"model.layers.0.{name}_layernorm.weight" for name in ("input", "post_attention")}
    assert stock[1].keys() - found[1].keys() == folded
    assert not any("layers.1" in name for name in stock[1])  # accelerate's weights of a call are no parameters
    for name, gradient in found[1].items():
        assert (gradient - stock[1][name]).abs().max() <= 1e-5 * stock[1][name].abs().max()
    assert found[2] < 0.7 * stock[2]
