"""Patching composes with the ways in which people train."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import memopt
from memopt.errors import NegativeVerdict, RecipeError
from memopt.patches.apply import is_patched
from memopt.trace.account import account
from tests.factories import tiny_inputs, tiny_model
from tests.support.compare import gradients_of, loss_and_gradients

FAMILIES = ["llama", "gpt2", "bert", "opt"]


def assert_close(ours, stock):
    """fp32 gradients of two orders of summation: far below what a wrong formula would give."""
    assert ours.keys() == stock.keys()
    for name, expected in stock.items():
        scale = expected.abs().max()
        assert (ours[name] - expected).abs().max() <= 1e-4 * scale + 1e-7, name


@pytest.mark.parametrize("name", FAMILIES)
def test_gradient_accumulation(name):
    inputs = [tiny_inputs(name, 2, 16), tiny_inputs(name, 2, 20)]
    results = []
    for model in (tiny_model(name), memopt.patch(tiny_model(name))):
        for batch in inputs:
            (model(**batch).loss / 2).backward()
        results.append(gradients_of(model))
    assert_close(results[1], results[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_two_backwards_of_a_retained_graph(name):
    model, inputs = memopt.patch(tiny_model(name)), tiny_inputs(name, 2, 16)
    loss, first = loss_and_gradients(model, inputs, retain_graph=True)
    model.zero_grad()
    loss.backward(retain_graph=True)
    second = gradients_of(model)
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert all(torch.equal(first[n], p.grad) for n, p in model.named_parameters() if p.grad is not None)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_activation_checkpointing_on_top(name, use_reentrant):
    inputs = tiny_inputs(name, 2, 16)
    _, stock = loss_and_gradients(tiny_model(name), inputs)
    model = memopt.patch(tiny_model(name))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.train()
    _, ours = loss_and_gradients(model, inputs)
    assert_close(ours, stock)


def test_a_checkpointed_patched_model_keeps_what_a_checkpointed_stock_model_keeps():
    inputs = tiny_inputs("llama", 2, 64)
    totals = []
    for model in (tiny_model("llama"), memopt.patch(tiny_model("llama"))):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        totals.append(account(model, lambda model=model: model(**inputs).loss).total)
    assert totals[1] <= totals[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_autocast_bf16(name):
    inputs = tiny_inputs(name, 2, 24)
    with torch.autocast("cpu", torch.bfloat16):
        stock_loss, stock = loss_and_gradients(tiny_model(name), inputs)
        patched_loss, ours = loss_and_gradients(memopt.patch(tiny_model(name)), inputs)
    assert abs(patched_loss - stock_loss) <= 2**-7 * stock_loss
    _, exact = loss_and_gradients(tiny_model(name), inputs)

    def error(gradients):
        return torch.stack([(gradients[n] - exact[n]).norm() / exact[n].norm().clamp(min=1e-3) for n in exact]).median()

    assert error(ours) <= 1.25 * error(stock)


@pytest.mark.parametrize(("name", "copies"), [("llama", 5), ("vit", 4), ("bert", 4)])
def test_under_autocast_no_linear_keeps_a_cast_of_its_own_of_a_norm_output(name, copies):
    """q, k, v and gate, up (or fc1) each keep a bf16 cast of an fp32 norm output in the stock model."""
    inputs = tiny_inputs(name, 2, 24)

    def kept_by_linears(model, blocks):
        with torch.autocast("cpu", torch.bfloat16):
            kept = account(model, lambda: model(**inputs).loss, blocks=blocks).of_block(blocks[1])
        hidden = [
            k for k in kept if k.dtype == "bfloat16" and k.shape[-1] == model.config.hidden_size and k.shape[0] == 2
        ]
        return [k for k in hidden if all(operation == "linear" for _, operation in k.savers)]

    model = tiny_model(name)
    blocks = memopt.plan_for(model).sites.blocks
    assert len(kept_by_linears(model, blocks)) == copies
    assert kept_by_linears(memopt.patch(model), blocks) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_eval_mode_without_gradients_is_bitwise_the_stock_model(name):
    inputs = tiny_inputs(name, 2, 16)
    stock, patched = tiny_model(name).eval(), memopt.patch(tiny_model(name)).eval()
    with torch.no_grad():
        assert torch.equal(stock(**inputs).logits, patched(**inputs).logits)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_generate(name):
    ids = tiny_inputs(name, 2, 8)["input_ids"]
    stock, patched = tiny_model(name).eval(), memopt.patch(tiny_model(name)).eval()
    expected = stock.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(patched.generate(ids, max_new_tokens=6, do_sample=False), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_deep_copy_is_independent_and_patched(name):
    original, inputs = memopt.patch(tiny_model(name)), tiny_inputs(name, 2, 16)
    clone = copy.deepcopy(original)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.zero_()
    assert is_patched(clone)
    _, ours = loss_and_gradients(clone, inputs)
    _, stock = loss_and_gradients(tiny_model(name), inputs)
    assert_close(ours, stock)
    assert all(p.grad is None for p in original.parameters())


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_lora_added_before_or_after_patching(name, order):
    inputs = tiny_inputs(name, 2, 24)

    def with_lora(model):
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        return get_peft_model(model, config)

    reference = with_lora(tiny_model(name))
    stock_bytes = account(reference, lambda: reference(**inputs).loss).total
    _, stock = loss_and_gradients(reference, inputs)
    model = (
        memopt.patch(with_lora(tiny_model(name))) if order == "before" else with_lora(memopt.patch(tiny_model(name)))
    )
    assert account(model, lambda: model(**inputs).loss).total < 0.85 * stock_bytes
    _, ours = loss_and_gradients(model, inputs)
    assert len(ours) > 0
    assert_close(ours, stock)


def test_two_patched_models_share_no_state():
    a, b = tiny_model("llama"), tiny_model("llama", seed=1)
    stock_class = type(a.model.layers[0])
    memopt.patch(a)
    assert not is_patched(b)
    assert type(b.model.layers[0]) is stock_class
    memopt.patch(b)
    memopt.unpatch(a)
    assert is_patched(b)
    assert type(a.model.layers[0]) is stock_class


def test_patching_twice_is_an_error():
    model = memopt.patch(tiny_model("llama"))
    with pytest.raises(NegativeVerdict, match="already patched"):
        memopt.patch(model)


def test_folding_in_memory_is_refused():
    with pytest.raises(RecipeError, match="checkpoints"):
        memopt.patch(tiny_model("llama"), "exact")


def test_a_model_with_nothing_to_patch_is_an_error():
    with pytest.raises(NegativeVerdict, match="can be patched"):
        memopt.patch(nn.Sequential(nn.Linear(4, 4)), inputs={"input": torch.randn(2, 4)})


def test_frozen_parameters_stay_frozen_and_hooks_stay():
    model = tiny_model("llama")
    norm = model.model.layers[0].input_layernorm
    norm.weight.requires_grad_(False)
    seen = []
    norm.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    memopt.patch(model)
    _, gradients = loss_and_gradients(model, tiny_inputs("llama", 2, 16))
    assert "model.layers.0.input_layernorm.weight" not in gradients
    assert len(seen) == 1


def test_isinstance_and_class_names_stay():
    model = tiny_model("bert")
    names = [type(module).__name__ for module in model.modules()]
    memopt.patch(model)
    assert [type(module).__name__ for module in model.modules()] == names
    assert isinstance(model.bert.encoder.layer[0].output.LayerNorm, nn.LayerNorm)


def test_an_instance_whose_forward_was_replaced_is_left_with_a_warning():
    model = tiny_model("llama")
    norm = model.model.layers[0].input_layernorm
    norm.forward = norm.forward
    with pytest.warns(UserWarning, match=r"model\.layers\.0\.input_layernorm.*replaced on the instance"):
        memopt.patch(model)


def test_a_patched_model_survives_pickling():
    model, inputs = memopt.patch(tiny_model("gpt2")), tiny_inputs("gpt2", 2, 16)
    restored = pickle.loads(pickle.dumps(model))
    assert is_patched(restored)
    _, expected = loss_and_gradients(model, inputs)
    _, got = loss_and_gradients(restored, inputs)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_torch_compile_gives_the_stock_gradients():
    """Of a ViT; tests/patches/test_compiled.py has the Llama."""
    inputs = tiny_inputs("vit", 2, 16)
    _, stock = loss_and_gradients(tiny_model("vit"), inputs)
    model = memopt.patch(tiny_model("vit"))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    compiled(**inputs).loss.backward()
    assert_close({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, stock)


class NoisyActivation(nn.Module):
    """Several operations, smooth, and random in training."""

    def forward(self, z):
        return torch.nn.functional.dropout(0.5 * z * (1 + torch.tanh(z)), 0.3, self.training)


@pytest.mark.parametrize("activation", [NoisyActivation(), nn.RReLU()], ids=["noisy", "rrelu"])
def test_a_random_activation_is_not_run_twice(activation):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), copy.deepcopy(activation), nn.Linear(16, 8), nn.LayerNorm(8)).train()

    def gradients(model):
        torch.manual_seed(1)
        x = torch.linspace(-2, 2, 32).view(4, 8)
        (model(x) * torch.linspace(-1, 3, 32).view(4, 8)).sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    patched = memopt.patch(make(), inputs={"input": torch.randn(4, 8)})
    assert_close(gradients(patched), gradients(make()))


def test_experts_do_not_hide_the_blocks_of_a_model_in_memory():
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=67,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).train()
    inputs = tiny_inputs("llama", 2, 24)
    plan = memopt.plan_for(model)
    assert plan.sites.blocks == ("model.layers.0", "model.layers.1")
    before = account(model, lambda: model(**inputs).loss).saved
    _, stock = loss_and_gradients(model, inputs)
    memopt.patch(model)
    assert account(model, lambda: model(**inputs).loss).saved < 0.8 * before
    _, ours = loss_and_gradients(model, inputs)
    assert_close(ours, stock)


def test_a_norm_called_by_keyword_is_patched_too():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(self.norm(input=x))

    torch.manual_seed(0)
    model, x = Block(), torch.randn(4, 8, requires_grad=True)
    model(x).sum().backward()
    stock = {name: p.grad.clone() for name, p in model.named_parameters()}
    memopt.patch(model, inputs={"x": torch.randn(4, 8)})
    model.zero_grad()
    y = model(x)
    assert "NormFunction" in y.grad_fn.next_functions[1][0].name()
    y.sum().backward()
    assert_close({name: p.grad for name, p in model.named_parameters()}, stock)


def test_a_forward_that_is_replaced_later_is_honoured(monkeypatch):
    model = memopt.patch(tiny_model("llama"))
    cls = memopt.unpatch(tiny_model("llama")).model.layers[0].__class__
    calls = []
    stock = cls.forward

    def replaced(self, *args, **kwargs):
        calls.append(self)
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(cls, "forward", replaced)
    model(**tiny_inputs("llama", 2, 8))
    assert len(calls) == 2


def test_unpatching_leaves_a_class_that_was_put_on_top():
    model = memopt.patch(tiny_model("llama"))
    layer = model.model.layers[0]
    layer.__class__ = type("Sharded", (type(layer),), {"unshard": lambda self: "unsharded"})
    memopt.unpatch(model)
    assert layer.unshard() == "unsharded"
    assert not is_patched(model)
    assert model(**tiny_inputs("llama", 2, 8)).loss.isfinite()
    with pytest.warns(UserWarning, match="a tool has made its own class"):
        memopt.patch(model)


def test_function_transforms_get_the_stock_operations():
    model = memopt.patch(tiny_model("bert"))
    inputs = tiny_inputs("bert", 2, 8)
    parameters = dict(model.named_parameters())

    def loss(values):
        return torch.func.functional_call(model, values, kwargs=inputs).loss

    gradients = torch.func.grad(loss)(parameters)
    _, expected = loss_and_gradients(tiny_model("bert"), inputs)
    assert_close({name: gradients[name] for name in expected}, expected)


@pytest.mark.parametrize("recipe", ["exact-unfolded", "exact-levels", "long-context"])
@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_a_graph_of_operations_gets_the_stock_operations(recipe, pre_dispatch):
    ids, _, labels = tiny_inputs("bert", 2, 8).values()

    def gradients(model):
        graph = make_fx(lambda ids, labels: model(ids, labels=labels).loss, pre_dispatch=pre_dispatch)(ids, labels)
        graph(ids, labels).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    assert_close(gradients(memopt.patch(tiny_model("bert"), recipe)), gradients(tiny_model("bert")))


def test_a_model_that_cannot_be_run_is_patched_norm_by_norm_with_a_warning():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, a, b):
            return self.linear(self.norm(a * b))

    model = Odd()
    with pytest.warns(UserWarning, match="Pass inputs"):
        memopt.patch(model)
    y = model(torch.randn(2, 8), torch.randn(2, 8, requires_grad=True))
    assert "NormFunction" in y.grad_fn.next_functions[1][0].name()


def kept_with(**rules) -> int:
    model, inputs = tiny_model("llama"), tiny_inputs("llama", 2, 24)
    if rules:
        memopt.patch(model, memopt.Recipe(name="test", norms={"fold": "none", **rules.pop("norms", {})}, **rules))
    return account(model, lambda: model(**inputs).loss).saved


def test_an_ignored_mlp_is_really_left_alone():
    none = {"method": "none"}
    only_norms = kept_with(activations=none, gated_mlps=none)
    assert kept_with(ignore=("*.mlp", "*.act_fn")) == only_norms
    assert kept_with() > only_norms > kept_with(ignore=())


def test_targets_reach_what_they_name_and_nothing_else():
    none = {"method": "none"}
    assert kept_with(targets=("*layernorm", "model.norm")) == kept_with(activations=none, gated_mlps=none)
    assert kept_with(targets=("*.mlp", "*.act_fn")) == kept_with(norms=none)


class IdleNorm(nn.Module):
    """A norm without an affine that no forward runs: nothing tells its width."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.idle = WeightlessRMS()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


class WeightlessRMS(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def test_a_norm_of_unknown_width_is_patched() -> None:
    model = memopt.patch(IdleNorm(), inputs={"x": torch.randn(2, 3, 8)})
    x = torch.randn(2, 5, requires_grad=True)
    assert torch.allclose(model.idle(x), WeightlessRMS()(x))
