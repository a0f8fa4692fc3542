"""Dropouts that a forward calls as functions, attention's among them, keep seeds too."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.patches.dropout import functions
from memopt.patches.dropout.functions import seeded_attention
from memopt.patches.functions import patch_functions
from memopt.trace.account import account
from tests.factories import tiny_inputs, tiny_model
from tests.support.compare import gradients_of

P, SEED = 0.25, 11
BERT = {"hidden_dropout_prob": P, "attention_probs_dropout_prob": P}
OPT = {"dropout": P, "attention_dropout": P}
CASES = {"bert": BERT, "opt": OPT}
NEVER = 1e-15
"""A probability with which nothing is dropped here."""


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def leaves(heads: int = 4, keys: int = 9) -> list[Tensor]:
    return [each.requires_grad_() for each in (draw(2, 4, 7, 8), draw(2, heads, keys, 8), draw(2, heads, keys, 8))]


def padded(keys: int = 9) -> Tensor:
    mask = torch.rand(2, 1, 7, keys, generator=torch.Generator().manual_seed(0)) < 0.7
    mask[1, :, 3] = False  # a row that sees no key
    return mask


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 0.3},
    "causal": {"is_causal": True},
    "padded": {"mask": padded()},
    "biased": {"mask": draw(4, 7, 9).requires_grad_()},
    "grouped": {"enable_gqa": True},
}


@pytest.mark.parametrize("form", OPTIONS)
def test_without_a_drop_it_is_pytorchs_attention(form: str) -> None:
    options = dict(OPTIONS[form])
    mask = options.pop("mask", None)
    tensors = leaves(heads=2 if form == "grouped" else 4)
    wanted = [*tensors, *([mask] if mask is not None and mask.requires_grad else [])]
    mine = seeded_attention(*tensors, mask, NEVER, SEED, **options)
    theirs = F.scaled_dot_product_attention(*tensors, mask, **options)
    assert torch.allclose(mine, theirs, rtol=0, atol=1e-14)
    dy = draw(*theirs.shape)
    for one, other in zip(torch.autograd.grad(mine, wanted, dy), torch.autograd.grad(theirs, wanted, dy), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-13)


def test_values_and_gradients_are_those_of_one_mask() -> None:
    query, key, value = tensors = leaves()
    y = seeded_attention(*tensors, None, P, SEED)
    # With the identity for values, the output is the dropped-out probabilities themselves.
    probabilities = (query @ key.transpose(-2, -1) / math.sqrt(8)).softmax(-1)
    dropped = seeded_attention(query, key, torch.eye(9, dtype=torch.float64).expand(2, 4, 9, 9), None, P, SEED)
    factors = (dropped / probabilities).detach()
    is_kept = factors > 0.5
    assert torch.allclose(factors, is_kept.double() / (1 - P), rtol=0, atol=1e-12)
    assert 0 < int((~is_kept).sum()) < factors.numel() / 2
    dy = draw(*y.shape)
    expected = torch.autograd.grad((probabilities * factors) @ value, tensors, dy)
    torch.manual_seed(99)  # what is drawn after the forward must not matter
    for one, other in zip(torch.autograd.grad(y, tensors, dy), expected, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("how", ["is_grads_batched", "vmap"])
def test_gradients_of_several_outputs_at_once_are_those_of_each(how: str) -> None:
    tensors = leaves()
    y = seeded_attention(*tensors, padded(), P, SEED)
    directions = draw(3, *y.shape)

    def gradients_of(dy: Tensor, **options: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, tensors, dy, retain_graph=True, **options)

    one_by_one = zip(*(gradients_of(dy) for dy in directions), strict=True)
    found = gradients_of(directions, is_grads_batched=True) if how != "vmap" else torch.vmap(gradients_of)(directions)
    for together, each in zip(found, one_by_one, strict=True):
        assert torch.allclose(together, torch.stack(each), rtol=0, atol=1e-13)


def test_each_probability_is_dropped_on_its_own() -> None:
    shape, keys = (8, 4, 32), 32
    query, key = torch.zeros(*shape, 4), torch.zeros(8, 4, keys, 4)
    kept = [
        seeded_attention(query, key, torch.eye(keys).expand(8, 4, keys, keys), None, P, seed) != 0 for seed in (1, 2)
    ]
    count = kept[0].numel()
    for drawn, expected in ((kept[0], 1 - P), (kept[0] == kept[1], P * P + (1 - P) ** 2)):
        deviation = math.sqrt(expected * (1 - expected) / count)
        assert abs(float(drawn.double().mean()) - expected) < 6 * deviation


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_computed_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    low = [tensor.detach().to(dtype) for tensor in leaves()]
    expected = seeded_attention(*(tensor.float() for tensor in low), None, P, SEED).to(dtype)
    assert torch.equal(seeded_attention(*low, None, P, SEED), expected)
    with torch.autocast("cpu", dtype):
        assert torch.equal(seeded_attention(*(tensor.float() for tensor in low), None, P, SEED), expected)


def model(name: str, attention: str = "sdpa", **overrides: Any) -> nn.Module:
    made = tiny_model(name, **{**CASES[name], **overrides}).train()
    made.set_attn_implementation(attention)
    return made


def seeded(made: nn.Module) -> nn.Module:
    return memopt.patch(made, memopt.load_recipe("exact-unfolded", ["dropouts.method=seed"]))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_a_model_saves_what_it_saves_without_dropouts(name: str, attention: str) -> None:
    inputs = tiny_inputs(name)
    with_dropouts = seeded(model(name, attention))
    without = memopt.patch(model(name, attention, **dict.fromkeys(CASES[name], 0.0)))
    saved, limit = (account(each, lambda each=each: each(**inputs).loss).saved for each in (with_dropouts, without))
    assert saved <= 1.02 * limit  # q, k and v in one form or another, and statistics of attention's rows
    plain = memopt.patch(model(name, attention))
    assert account(plain, lambda: plain(**inputs).loss).saved > 1.2 * limit


def gradients(made: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(5)
    loss = made(**inputs).loss
    torch.manual_seed(6)
    return gradients_of(made, loss)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_checkpointing_runs_a_block_again_with_the_same_masks(name: str, use_reentrant: bool) -> None:
    made, inputs = seeded(model(name)), tiny_inputs(name)
    expected = gradients(made, inputs)
    made.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        made.enable_input_require_grads()
    for key, gradient in gradients(made, inputs).items():
        # The loss of one is summed in another order.
        assert torch.allclose(gradient, expected[key], rtol=1e-5, atol=1e-6), key


def test_a_recipe_that_checkpoints_blocks_draws_the_masks_of_one_that_does_not() -> None:
    seeds = ["dropouts.method=seed"]
    found = [
        gradients(memopt.patch(model("opt"), memopt.load_recipe(recipe, seeds)), tiny_inputs("opt"))
        for recipe in ("exact-unfolded", "exact-levels")
    ]
    for key, gradient in found[0].items():
        assert torch.allclose(found[1][key], gradient, rtol=1e-5, atol=1e-6), key
    made = memopt.patch(model("opt"), memopt.load_recipe("exact-levels", seeds))
    assert not memopt.summary(made).refused


def test_masks_that_are_saved_are_noted() -> None:
    told = [
        "dropouts that save a mask" in str(memopt.summary(made))
        for made in (
            memopt.patch(model("bert")),
            seeded(model("bert")),
            memopt.patch(model("bert", **dict.fromkeys(BERT, 0.0))),
        )
    ]
    assert told == [True, False, False]


def test_every_layer_and_every_step_draws_masks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def watched(*args: Any, **options: Any) -> Tensor:
        seeds.append(args[5])
        return seeded_attention(*args, **options)

    monkeypatch.setattr(functions, "seeded_attention", watched)
    made, inputs = seeded(model("bert")), tiny_inputs("bert")
    torch.manual_seed(0)
    for _ in range(2):
        made(**inputs)
    assert len(seeds) == len(set(seeds)) == 4
    torch.manual_seed(0)
    made(**inputs)
    assert seeds[4:] == seeds[:2]


@pytest.mark.parametrize("name", CASES)
def test_compiled_functions_keep_their_masks(name: str) -> None:
    theirs, x, results = model(name), torch.randn(2, 8, 64), []
    for made in (theirs, seeded(copy.deepcopy(theirs))):
        block = next(each for key, each in made.named_modules() if key.endswith(("layer.0", "layers.0")))
        torch.manual_seed(0)
        y = torch.compile(block, backend="eager", fullgraph=True)(x)
        results.append(y[0] if isinstance(y, tuple) else y)
    assert torch.equal(*results)


@pytest.mark.parametrize("name", CASES)
def test_in_eval_mode_a_model_is_the_stock_one(name: str) -> None:
    made, inputs = model(name).eval(), tiny_inputs(name)
    with torch.no_grad():
        expected = made(**inputs).logits
        assert torch.equal(seeded(made)(**inputs).logits, expected)


class CheckpointsItself(nn.Module):
    """Activation checkpointing inside a forward that calls a dropout."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.use_reentrant = use_reentrant

    def inner(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.5, self.training).square()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("around", [None, True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_region_checkpointed_inside_the_forward_runs_again_with_its_mask(
    use_reentrant: bool, around: bool | None
) -> None:
    made = CheckpointsItself(use_reentrant)
    patch_functions(made, functions.seeded_in_training)
    x = draw(4, 8).requires_grad_()
    y = made(x) if around is None else checkpoint(made, x, use_reentrant=around)
    factors = (y.detach() != 0).double() * 2
    expected = torch.autograd.grad((made.linear(x) * factors).square().sum(), x)
    y.sum().backward()
    assert torch.allclose(x.grad, expected[0], rtol=0, atol=1e-12)


def test_dropouts_of_later_adapters_run_again_with_the_masks_of_the_forward() -> None:
    """OPT's blocks call dropouts as functions, so a dropout that comes later into a linear of theirs keeps a seed."""
    found = []
    for which in ("none", "fc1"):
        rules = memopt.load_recipe("exact-unfolded", ["dropouts.method=seed", f"linears.recompute={which}"])
        made = memopt.patch(model("opt", activation_function="gelu"), rules)
        torch.manual_seed(0)
        config = LoraConfig(r=2, lora_dropout=0.5, target_modules=["fc1", "fc2"], init_lora_weights=False)
        found.append(gradients(get_peft_model(made, config).train(), tiny_inputs("opt")))
    assert found[0]
    assert all(torch.equal(found[1][key], gradient) for key, gradient in found[0].items())


def test_attention_on_the_meta_device_runs_as_before() -> None:
    query = torch.empty(1, 2, 3, 4, device="meta")
    with functions.seeded_functions():
        assert F.scaled_dot_product_attention(query, query, query, dropout_p=P).shape == query.shape


def test_a_mask_beside_is_causal_is_the_error_that_it_is_in_stock() -> None:
    query, mask = torch.randn(1, 2, 3, 4, requires_grad=True), torch.zeros(3, 3)
    with functions.seeded_functions(), pytest.raises(RuntimeError, match="is_causal"):
        F.scaled_dot_product_attention(query, query, query, mask, P, is_causal=True)
