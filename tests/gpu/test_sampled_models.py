"""Models with sampled linears on a real device: what is not estimated is stock's, nothing waits, seeds repeat it."""

from __future__ import annotations

import copy

import pytest
import torch

import memopt
from memopt.patches.sampled_linear.padding import PaddingWatch
from memopt.plan.recipe import load_recipe
from tests.factories import tiny_inputs, tiny_model

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
NAMES = ["bert", "vit", "opt", "t5", "gpt2"]


def built(name: str, recipe: str | None) -> torch.nn.Module:
    model = tiny_model(name).to(DEVICE).train()
    if recipe is None:
        return model
    # Codes and masks of dropout would change other gradients as well.
    rules = load_recipe(recipe, ["activations.code=none", "dropouts.method=none", "norms.method=none"])
    return memopt.patch(model, rules)


def gradients(model: torch.nn.Module, name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    model.zero_grad()
    inputs = {key: value.to(DEVICE) for key, value in tiny_inputs(name, 2, 32).items()}
    torch.manual_seed(seed)
    model(**inputs).loss.backward()
    return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recipe", ["sampled", "wta-crs"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.rotates(3)
def test_only_sampled_weights_have_other_gradients(name: str, recipe: str) -> None:
    stock, model = built(name, None), built(name, recipe)
    sampled = {site.parameter for site in memopt.plan_for(stock, load_recipe(recipe)).chosen("linear", "sample")}
    for module in (stock, model):
        for part in module.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
    exact, found = gradients(stock, name), gradients(model, name)
    largest = max(float(gradient.abs().max()) for gradient in exact.values())
    for key, gradient in exact.items():
        if key not in sampled and not key.endswith(".weight"):
            torch.testing.assert_close(found[key], gradient, rtol=1e-3, atol=1e-5 * largest)


@pytest.mark.parametrize("name", ["bert", "opt"])
def test_a_seed_repeats_the_bits(name: str) -> None:
    model = built(name, "sampled")
    first, second = gradients(model, name, 3), gradients(copy.deepcopy(model), name, 3)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_neither_forward_nor_backward_waits_for_the_device() -> None:
    """Without an attention mask, at which stock models look."""
    given = tiny_inputs("opt", 2, 32)
    inputs = {key: value.to(DEVICE) for key, value in given.items() if key != "attention_mask"}
    before = torch.cuda.get_sync_debug_mode()

    def waits(module: torch.nn.Module) -> bool:
        module(**inputs).loss.backward()  # compiles what there is to compile
        torch.cuda.set_sync_debug_mode("error")
        try:
            module(**inputs).loss.backward()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            return True
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return False

    if waits(built("opt", None)):
        pytest.skip("the stock model waits for the device itself")
    assert not waits(built("opt", "wta-crs"))


def test_what_was_seen_of_padding_is_read_one_call_later_and_nobody_waits_for_it() -> None:
    watch, norms = PaddingWatch(), torch.tensor([2.0, 1.0, 0.0], device=DEVICE)
    linear, real = watch.add("linear"), torch.tensor([True, True, False], device=DEVICE)
    before, found = torch.cuda.get_sync_debug_mode(), []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            watch.note(linear, norms, real, left_out=False)
            watch.settle()
            found.append(watch.leaves_out(linear))
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert found == [False, False, True, True]
