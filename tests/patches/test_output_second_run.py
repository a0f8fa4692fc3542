"""The second run of a linear whose output is recomputed: masks, hooks, autocast and state are those of the forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import memopt
from memopt.patches import rerun
from memopt.patches.swap import is_swapped
from memopt.verification.gradient import compare_gradients
from tests.factories import tiny_inputs
from tests.patches.test_output_recompute import EXACT, SAVED, adapted, bytes_saved, chosen, model_of, recipe, same, step


@pytest.mark.parametrize("settings", [(), ("dropouts.method=seed",)], ids=["masks", "seeds"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_with_dropout_run_again_with_the_masks_of_the_forward(when, settings):
    """Adapters may come before the patch or after it; the masks are the stock model's unless they are seeded."""
    inputs, results = tiny_inputs("llama", 2, 16), []
    for rules in (None, memopt.load_recipe(EXACT, settings), recipe(settings=settings)):
        model = model_of("llama")
        if when == "after" and rules is not None:
            memopt.patch(model, rules)
        model = adapted(model, 0.5)
        if when == "before" and rules is not None:
            memopt.patch(model, rules)
        step(model, inputs)
        results.append((step(model, inputs, seed=5), torch.rand(2), bytes_saved(model, inputs)))
    (stock, next_stock, _), (exact, next_exact, kept), (found, next_found, saved) = results
    assert same(found, exact)
    assert torch.equal(next_found, next_exact)  # and later draws are what they would have been
    # Gate and up of both blocks, values of the second: the input of the first is frozen, so its norm saves nothing.
    assert kept - saved == 4 * 32 * (4 * 172 + 32)
    if not settings:
        assert torch.equal(next_found, next_stock)
        for name, gradient in stock.items():
            assert (found[name] - gradient).norm() <= 1e-6 * gradient.norm(), name


def test_forgetting_the_masks_would_be_seen(monkeypatch):
    monkeypatch.setattr(rerun, "_set_random_states", lambda states, x: None)
    inputs = tiny_inputs("llama", 2, 16)
    exact, model = (memopt.patch(adapted(model_of("llama"), 0.5), rules) for rules in (EXACT, recipe()))
    assert not same(step(model, inputs), step(exact, inputs))


def test_adapters_that_leave_take_nothing_along():
    inputs, model = tiny_inputs("llama", 2, 16), memopt.patch(model_of("llama"), recipe())
    plain = step(model, inputs)
    adapters = adapted(model)
    step(adapters, inputs)
    model = adapters.unload()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    assert same(step(model, inputs), plain)
    assert chosen(model) == SAVED["llama"]
    assert not any(is_swapped(module) for module in memopt.unpatch(model).modules())


def test_under_autocast_the_products_run_in_its_dtype_and_leave_no_casts_behind():
    inputs, found = tiny_inputs("llama", 2, 16), []
    truth = step(model_of("llama").double(), inputs)
    for rules, inside in ((None, False), (recipe(), False), (recipe(), True)):
        model = model_of("llama") if rules is None else memopt.patch(model_of("llama"), rules)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**inputs).loss
        if inside:  # casts of weights are made here without gradients: autocast may not hand them to the forward
            with torch.autocast("cpu", torch.bfloat16):
                loss.backward()
                model.zero_grad()
                loss = model(**inputs).loss
        loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    stock, outside, within = found
    assert same(within, outside)
    for check in compare_gradients([outside], [stock], truth, torch.bfloat16, "fp64", 0.0, 0.0):
        assert check.status == "pass", check


def test_hooks_run_again_and_what_they_change_is_not_changed_twice():
    inputs, results, calls = tiny_inputs("llama", 2, 16), [], []
    for rules in (EXACT, recipe()):
        model = memopt.patch(model_of("llama"), rules)
        up = model.model.layers[0].mlp.up_proj
        up.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        up.register_forward_hook(lambda module, args, y: calls.append(1))
        results.append(step(model, inputs))
    assert same(*results)
    assert len(calls) == 3


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_hooks_that_are_added_after_the_forward_do_not_run_again(name, hooked):
    results = []
    for model in (model_of(name), memopt.patch(model_of(name), recipe())):
        linears = [m for n, m in model.named_modules() if n.split(".")[-1] in SAVED[name]]
        if hooked:
            for linear in linears:
                linear.register_forward_hook(lambda module, args, y: None)
        loss = model(**tiny_inputs(name, 2, 16)).loss
        for linear in linears:
            prune.l1_unstructured(linear, "weight", 0.5)
        loss.backward()
        results.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert results[0].keys() == results[1].keys()
    assert all((results[1][n] - g).norm() <= 1e-5 * g.norm() + 1e-9 for n, g in results[0].items())


@pytest.mark.parametrize("change", ["weight", "buffer"])
def test_what_the_module_holds_may_not_change_before_backward(change):
    model, inputs = memopt.patch(model_of("llama"), recipe("up_proj")), tiny_inputs("llama", 2, 16)
    up = model.model.layers[0].mlp.up_proj
    up.register_buffer("scale", torch.ones(1))
    model.model.embed_tokens.requires_grad_(False)
    loss = model(**inputs).loss
    with torch.no_grad():
        (up.weight if change == "weight" else up.scale).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Counting(nn.Linear):
    """Not the same when it runs again."""

    def __init__(self, stock: nn.Linear) -> None:
        super().__init__(stock.in_features, stock.out_features, bias=False)
        self.weight = stock.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


def test_a_module_that_changes_its_buffers_saves_its_output():
    inputs, results = tiny_inputs("llama", 2, 16), []
    for rules in (EXACT, recipe("up_proj")):
        model = model_of("llama")
        mlp = model.model.layers[0].mlp
        memopt.patch(model, rules)
        mlp.up_proj = Counting(mlp.up_proj)
        results.append(step(model, inputs))
        assert mlp.up_proj.calls == 1
    assert same(*results)


def test_a_spectral_norm_that_is_a_hook_saves_its_output():
    """... which counts every run: it changes its buffers, and the weight with them."""
    found = []
    for patched in (False, True):
        model, inputs = model_of("llama").train(), tiny_inputs("llama")
        torch.manual_seed(0)
        torch.nn.utils.spectral_norm(model.model.layers[0].mlp.up_proj)
        if patched:
            memopt.patch(model, recipe("up_proj"))
        gradients = step(model, inputs)
        found.append((gradients, model.model.layers[0].mlp.up_proj.weight_u.clone()))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_a_frozen_linear_whose_input_nobody_saves_keeps_its_output():
    """Its input would have to be saved in place of its output."""
    inputs, kept = tiny_inputs("gpt2", 2, 16), []
    for rules in (EXACT, recipe()):
        model = memopt.patch(model_of("gpt2"), memopt.load_recipe(rules, ("norms.method=none",)))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("c_fc" not in name and "c_attn" not in name)
        kept.append(bytes_saved(model, inputs))
    assert kept[0] == kept[1]
