"""Linears whose output is recomputed (`linears.recompute`): the stock model's gradients, from fewer bytes."""

from __future__ import annotations

import copy
import functools
import itertools
import re

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.patches.linear import output
from memopt.patches.linear.decide import output_levels
from memopt.patches.linear.output import OutputRewrite
from memopt.patches.swap import is_swapped, swap_state
from memopt.trace.account import account, live_bytes
from memopt.verification.gradient import compare_gradients
from memopt.verification.models import cast_inputs
from tests.factories import tiny_inputs, tiny_model
from tests.support.compare import gradients_of, step_gradients, stock_and_patched
from tests.support.versions import needs

#: Tiny model -> linears of a block whose output something saves, and hidden states of `intermediate` and attention.
SAVED = {
    "llama": {"gate_proj", "up_proj", "v_proj"},
    "mistral": {"gate_proj", "up_proj"},  # values of grouped queries are repeated: a copy is saved
    "gemma2": {"gate_proj", "up_proj"},
    "qwen3": {"gate_proj", "up_proj", "v_proj"},
    "phi3": {"gate_up_proj"},  # of qkv only the values are saved, a third
    "gpt2": {"c_fc", "c_attn"},
    "bert": {"intermediate.dense", "query", "key", "value"},
    "vit": {"fc1", "q_proj", "k_proj", "v_proj"},
    "opt": {"k_proj", "v_proj"},  # ReLU saves its own output, not fc1's
}
NEWER = {"gemma2": needs("transformers", "5.23", "saves other outputs of gemma2's attention")}


#: Without what is done to the loss.
EXACT = memopt.load_recipe("exact-unfolded", ("loss.method=none",))


def recipe(*names: str, settings: tuple[str, ...] = ()):
    which = f"[{','.join(map(repr, names))}]" if names else "auto"
    return memopt.load_recipe(EXACT, (f"linears.recompute={which}", *settings))


def model_of(name: str, dtype=torch.float32):
    model = tiny_model(name, dtype)
    model.config.use_cache = False
    return model


def adapted(model, dropout=0.0, **options):
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout, **options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model.train()


step = functools.partial(step_gradients, seed=0)


def bytes_saved(model, inputs) -> int:
    return account(model, lambda: model(**inputs).loss).saved


def same(found, expected) -> bool:
    """To the bit: what is recomputed is what would have been saved."""
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def chosen(model) -> set[str]:
    names = (n for n, m in model.named_modules() if is_swapped(m) and isinstance(swap_state(m), OutputRewrite))
    return {re.sub(r"^.*\.\d+\.(.*?\.)*?(?=(intermediate\.)?\w+$)", "", name) for name in names}


@pytest.mark.parametrize("name", [pytest.param(name, marks=NEWER.get(name, ())) for name in SAVED])
def test_auto_takes_what_is_saved_and_changes_no_gradient(name):
    exact, inputs = memopt.patch(model_of(name), EXACT), tiny_inputs(name, 2, 16)
    expected, kept = step(exact, inputs), bytes_saved(exact, inputs)
    model = memopt.patch(model_of(name), recipe())
    assert chosen(model) == SAVED[name]
    for _ in range(2):
        assert same(step(model, inputs), expected)
    saved = bytes_saved(model, inputs)
    assert saved == live_bytes(lambda: model(**inputs).loss)
    assert saved < 0.85 * kept


@pytest.mark.parametrize("past", [0, 3])
def test_a_copy_of_values_in_a_cache_is_recomputed_where_it_holds_nothing_else(past):
    inputs, results, saved = {**tiny_inputs("llama", 2, 16), "use_cache": True, "attention_mask": None}, [], []
    for rules in (EXACT, recipe("v_proj")):
        model = memopt.patch(tiny_model("llama", num_key_value_heads=4), rules)

        def run(model=model):
            cache = transformers.DynamicCache(config=model.config)
            for layer in range(2 if past else 0):
                cache.update(*torch.ones(2, 2, 4, past, 16), layer)
            return model(**inputs, past_key_values=cache).loss

        run().backward()
        results.append({name: p.grad for name, p in model.named_parameters()})
        saved.append(account(model, run).saved)
    assert same(*results)
    assert saved[0] - saved[1] == (0 if past else 2 * 4 * 32 * 64)


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert"])
def test_in_16_bits_too_it_is_no_further_from_the_truth_than_stock(name):
    """To the bit where the norm in front rounds x_hat before it scales; else its recomputed output is off by that."""
    dtype = torch.bfloat16
    inputs = cast_inputs(tiny_inputs(name, 2, 24), dtype)
    truth = step(tiny_model(name, dtype).double(), cast_inputs(inputs, torch.float64))
    stock, exact = (
        step(model, inputs) for model in (tiny_model(name, dtype), memopt.patch(tiny_model(name, dtype), EXACT))
    )
    model = memopt.patch(tiny_model(name, dtype), recipe())
    found = step(model, inputs)
    assert same(found, exact) == (name == "llama")
    for check in compare_gradients([found], [stock], truth, dtype, "fp64", 0.0, 0.0):
        assert check.status == "pass", check


# --- with other tools ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_activation_checkpointing(reentrant):
    inputs, results = tiny_inputs("llama", 2, 16), []
    for rules in (EXACT, recipe()):
        model = adapted(memopt.patch(model_of("llama"), rules), 0.5)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        step(model, inputs)
        results.append(step(model, inputs))
    assert same(*results)


def test_inside_checkpointing_of_the_mlp_alone():
    inputs, results = tiny_inputs("llama", 2, 16), []
    for rules in (EXACT, recipe()):
        model = memopt.patch(model_of("llama"), rules)
        for layer in model.model.layers:
            run = layer.mlp.forward
            layer.mlp.forward = lambda x, run=run: checkpoint(run, x, use_reentrant=False)
        step(model, inputs)
        results.append(step(model, inputs))
    assert same(*results)


def test_with_offloaded_tensors():
    inputs, results = tiny_inputs("llama", 2, 16), []
    for rules in (EXACT, recipe()):
        model = memopt.patch(model_of("llama"), rules)
        with save_on_cpu():
            results.append(step(model, inputs))
    assert same(*results)


def test_a_graph_that_is_retained_and_partial_backwards():
    model, inputs = memopt.patch(model_of("llama"), recipe()), tiny_inputs("llama", 2, 16)
    expected = step(model, inputs)
    model.zero_grad()
    loss = model(**inputs).loss
    down = model.model.layers[0].mlp.down_proj.weight
    (first,) = torch.autograd.grad(loss, down, retain_graph=True)
    assert torch.equal(first, expected["model.layers.0.mlp.down_proj.weight"])
    loss.backward(retain_graph=True)
    assert same({n: p.grad for n, p in model.named_parameters()}, expected)
    model.zero_grad()
    loss.backward()
    assert same({n: p.grad for n, p in model.named_parameters()}, expected)


def test_a_changed_output_is_saved():
    inputs, results = tiny_inputs("llama", 2, 16), []
    for rules in (EXACT, recipe()):
        model = memopt.patch(model_of("llama"), rules)
        model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, y: y.mul_(2))
        results.append(step(model, inputs))
    assert same(*results)


def test_a_copy_of_the_model_trains_like_it():
    model, inputs = memopt.patch(model_of("llama"), recipe()), tiny_inputs("llama", 2, 16)
    expected = step(model, inputs)
    assert same(step(copy.deepcopy(model), inputs), expected)


# --- the plan --------------------------------------------------------------------------------------------------------


def rows(plan) -> dict[str, tuple[str, str]]:
    return {e.site: (e.action, e.reason) for e in plan.entries if e.kind == "linear" and ".0." in e.site}


def test_rows_say_what_is_recomputed_from_what_and_why_the_others_are_not():
    found = rows(memopt.plan_for(tiny_model("llama"), recipe("model.layers.0.mlp")))
    assert {site for site, (action, _) in found.items() if action == "recompute output"} == {
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    }
    assert found["model.layers.0.mlp.up_proj.weight"][1] == (
        "not saved by mul in model.layers.0.mlp: recomputed from its input, "
        "which model.layers.0.post_attention_layernorm saves anyway"
    )
    reads = "saves no input of its own: {} saves it, or the tensors that it is recomputed from"
    down, value = (found[f"model.layers.0.{name}.weight"] for name in ("mlp.down_proj", "self_attn.v_proj"))
    why = f"{reads.format('model.layers.0.mlp')}; output not recomputed: nothing saves it"
    assert down == ("read recomputed", why)
    assert value == ("read recomputed", reads.format("model.layers.0.input_layernorm"))
    assert found["model.layers.0.self_attn.o_proj.weight"] == ("keep", "exact as it is")


def test_experts_are_left_alone_with_a_reason():
    config = transformers.MixtralConfig(
        vocab_size=67, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=2, num_experts_per_tok=1, use_cache=False,
    )  # fmt: skip
    plan = memopt.plan_for(transformers.MixtralForCausalLM(config), recipe("*"))
    reasons = {reason for site, (_, reason) in rows(plan).items() if "experts" in site}
    assert {reason.split("; ")[-1] for reason in reasons} == {
        "output not recomputed: its weight is not one matrix, so no module computes it alone"
    }


def test_a_pattern_that_names_nothing_is_noted():
    plan = memopt.plan_for(tiny_model("gpt2"), recipe("up_proj"))
    assert any("linears.recompute 'up_proj' matches no linear" in note for note in plan.notes)


def test_a_block_has_levels():
    levels = output_levels(memopt.plan_for(model_of("llama"), recipe()))
    block = "model.layers.1"
    names = [f"{block}.mlp.up_proj", f"{block}.mlp.gate_proj", f"{block}.self_attn.v_proj"]
    assert list(levels) == ["model.layers.0", block]
    assert levels[block] == names
    inputs, saved = tiny_inputs("llama", 2, 16), []
    for n in range(4):
        model = memopt.patch(model_of("llama"), recipe(*names[:n]) if n else EXACT)
        saved.append(bytes_saved(model, inputs))
    assert [before - after for before, after in itertools.pairwise(saved)] == [4 * 32 * 172, 4 * 32 * 172, 4 * 32 * 32]


def test_verify_has_a_limit_for_the_bytes_that_should_be_saved(tmp_path, monkeypatch):
    tiny_model("llama", torch.bfloat16, use_cache=False).save_pretrained(tmp_path / "stock")
    memopt.patch_checkpoint(tmp_path / "stock", tmp_path / "out", recipe=recipe("mlp", "v_proj"))

    def failed() -> list[str]:
        return [each.id for each in memopt.verify(tmp_path / "out", level="memory").checks if each.status != "pass"]

    assert failed() == []  # what the report predicts too
    monkeypatch.setattr(output, "recomputed_output", lambda y, x, run: y)
    assert failed() == ["memory.recomputed"]


@pytest.mark.parametrize("trains", [True, False])
def test_it_runs_again_in_the_mode_of_the_forward(trains):
    inputs, config = tiny_inputs("llama", 2, 16), LoraConfig(target_modules=["up_proj"], lora_dropout=0.5, r=2)
    config.init_lora_weights = False
    model = get_peft_model(model_of("llama"), config)

    def gradients():
        model.zero_grad()
        model.train(trains)
        torch.manual_seed(0)
        loss = model(**inputs).loss
        model.train(not trains)
        loss.backward()
        assert all(module.training is not trains for module in model.modules())
        return gradients_of(model)

    expected = gradients()
    memopt.patch(model, recipe())
    assert "up_proj" in chosen(model)
    torch.testing.assert_close(gradients(), expected)


def test_it_runs_again_with_the_parameters_that_it_was_called_with():
    inputs, stock = tiny_inputs("llama", 2, 16), model_of("llama")
    others = {name: (p.detach() * 1.5).requires_grad_() for name, p in stock.named_parameters()}

    def gradients(model):
        loss = torch.func.functional_call(model, others, (), inputs).loss
        return dict(zip(others, torch.autograd.grad(loss, list(others.values())), strict=True))

    expected = gradients(stock)
    torch.testing.assert_close(gradients(memopt.patch(copy.deepcopy(stock), recipe())), expected)


@pytest.mark.parametrize("name", ["up_proj", "lora_A.default"])
def test_hooks_that_watch_the_graph_or_draw_run_again(name):
    inputs, config = tiny_inputs("llama", 2, 16), LoraConfig(target_modules=["up_proj"], r=2, init_lora_weights=False)
    stock = get_peft_model(model_of("llama"), config)

    def watch(module, args, output):
        output.retain_grad()
        torch.rand(1)

    for each, module in stock.named_modules():
        if each.endswith(name):
            module.register_forward_hook(watch)
    patched = memopt.patch(copy.deepcopy(stock), recipe())
    expected, random = step(stock, inputs), torch.get_rng_state()
    torch.testing.assert_close(step(patched, inputs), expected)
    assert torch.equal(torch.get_rng_state(), random)


def test_an_output_that_is_saved_outside_of_every_scope_is_left_and_the_plan_says_so() -> None:
    """DistilBERT's head is three modules beside its blocks."""
    config = transformers.DistilBertConfig(vocab_size=40, dim=32, hidden_dim=64, n_layers=2, n_heads=4, dropout=0.0)
    model = transformers.DistilBertForMaskedLM(config)
    entries = {entry.site: entry for entry in memopt.plan_for(model, recipe()).entries}
    assert not entries["vocab_transform.weight"].rewritten
    assert "saved by gelu in activation" in entries["vocab_transform.weight"].reason
    assert entries["distilbert.transformer.layer.0.ffn.lin1.weight"].action == "recompute output"


class _OwnLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


def test_proofs_in_a_checkpointed_block_save_nothing_there() -> None:
    found = []
    for model in stock_and_patched(lambda: tiny_model("llama", use_cache=False), "exact-levels"):
        for block in model.model.layers:  # proved to be a linear in the block's next forward
            block.mlp.up_proj = _OwnLinear(block.mlp.up_proj)
        for _ in range(2):
            model(**tiny_inputs("llama", 2, 16)).loss.backward()
        found.append([p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


class InPlace(nn.Module):
    """Changes the input of its first linear in place, which stock allows where that has saved a 16-bit cast of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        r = self.norm(x).float() + x
        y = self.fc2(nn.functional.gelu(self.fc1(r)))
        r += y
        return r


def test_the_input_may_change_in_place_where_autocast_has_saved_a_cast_of_it() -> None:
    torch.manual_seed(0)
    stock, x, found = nn.Sequential(InPlace(), InPlace()), torch.randn(2, 12, 16), []
    for model in (stock, memopt.patch(copy.deepcopy(stock), recipe(), inputs={"input": x})):
        with torch.autocast("cpu", torch.bfloat16):
            model(x).float().square().mean().backward()
        found.append({name: each.grad for name, each in model.named_parameters()})
    assert chosen(model)
    torch.testing.assert_close(found[1], found[0], rtol=0.02, atol=1e-3)
