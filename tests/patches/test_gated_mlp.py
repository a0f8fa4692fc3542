"""Gated MLPs run their activation and product as one operator, and everything around it stays as it was."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import memopt
from memopt.patches.gated_mlp.module import GatedMLPRewrite
from memopt.patches.swap import is_swapped, swap_state
from tests.factories import tiny_inputs, tiny_model
from tests.support.compare import step_gradients, stock_and_patched

GATED = ["llama", "qwen3", "gemma2", "phi3", "t5"]


def rewritten(model) -> list[nn.Module]:
    swapped = [module for module in model.modules() if is_swapped(module)]
    return [module for module in swapped if isinstance(swap_state(module), GatedMLPRewrite)]


def assert_close(ours, stock):
    assert ours.keys() == stock.keys()
    for name, expected in stock.items():
        assert (ours[name] - expected).abs().max() <= 1e-4 * expected.abs().max() + 1e-7, name


@pytest.mark.parametrize("name", GATED)
def test_every_gated_mlp_becomes_one_operator(name):
    model = memopt.patch(tiny_model(name))
    layers = model.config.num_hidden_layers
    assert len(rewritten(model)) == (2 * layers if name == "t5" else layers)


def test_no_tensor_is_kept_but_gate_and_up():
    """Three of the size of gate are kept by the stock MLP beside its linears: gate, act(gate), up, and the product."""
    model, inputs = tiny_model("llama"), tiny_inputs("llama", 2, 16)
    intermediate = model.config.intermediate_size

    def kept():
        pointers = set()

        def pack(tensor):
            if tensor.shape[-1:] == (intermediate,) and tensor.numel() == 2 * 16 * intermediate:
                pointers.add(tensor.data_ptr())
            return tensor

        with saved_tensors_hooks(pack, lambda t: t):
            loss = model(**inputs).loss
        del loss
        return len(pointers) // model.config.num_hidden_layers

    assert kept() == 4
    memopt.patch(model)
    assert kept() == 2


def test_a_dropout_on_the_product_draws_what_the_stock_model_draws():
    stock, patched = (tiny_model("t5", dropout_rate=0.3) for _ in range(2))
    memopt.patch(patched)
    inputs = tiny_inputs("t5", 2, 16)
    results = []
    for model in (stock, patched):
        torch.manual_seed(3)
        results.append(step_gradients(model, inputs))
    assert rewritten(patched)
    assert_close(results[1], results[0])


def test_an_adapter_on_down_is_called():
    config = LoraConfig(r=4, target_modules=["down_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = get_peft_model(tiny_model("llama"), config)
    inputs = tiny_inputs("llama", 2, 16)
    stock = step_gradients(model, inputs)
    memopt.patch(model)
    assert rewritten(model)
    assert_close(step_gradients(model, inputs), stock)


def test_hooks_on_the_children_are_called_once_each():
    model, inputs = memopt.patch(tiny_model("llama")), tiny_inputs("llama", 2, 16)
    calls = []
    for name in ("gate_proj", "up_proj", "down_proj"):
        child = model.get_submodule(f"model.layers.0.mlp.{name}")
        child.register_forward_hook(lambda *_, name=name: calls.append(name))
    model(**inputs).loss.backward()
    assert sorted(calls) == ["down_proj", "gate_proj", "up_proj"]


def test_a_down_that_is_replaced_later_is_the_one_that_runs():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model, inputs = memopt.patch(tiny_model("llama")), tiny_inputs("llama", 2, 16)
    mlp = model.model.layers[0].mlp
    plain, x = mlp.down_proj, torch.randn(1, 3, model.config.hidden_size, requires_grad=True)
    before = mlp(x)
    mlp.down_proj = Doubled(plain.in_features, plain.out_features, bias=False)
    mlp.down_proj.weight = plain.weight
    torch.testing.assert_close(mlp(x), 2 * before)
    model(**inputs).loss.backward()
    assert plain.weight.grad is not None


def test_unpatching_gives_the_stock_forward_back():
    model = memopt.patch(tiny_model("llama"))
    assert rewritten(model)
    memopt.unpatch(model)
    assert not rewritten(model)


def test_a_recipe_that_keeps_activations_leaves_the_stock_operations():
    recipe = memopt.load_recipe("exact-unfolded", ["activations.method=none"])
    assert not rewritten(memopt.patch(tiny_model("llama"), recipe))


def test_an_activation_that_is_replaced_later_is_the_one_that_runs():
    model, stock = memopt.patch(tiny_model("llama")), tiny_model("llama")
    for each in (model, stock):
        for layer in each.model.layers:
            layer.mlp.act_fn = nn.ReLU()
    inputs = tiny_inputs("llama", 2, 16)
    assert_close(step_gradients(model, inputs), step_gradients(stock, inputs))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_that_changes_the_activations_output_is_honoured(when):
    def halve(module, args, output):
        return output / 2

    results = []
    for patched in (False, True):
        model = tiny_model("llama")
        if patched and when == "after":
            memopt.patch(model)
        for layer in model.model.layers:
            layer.mlp.act_fn.register_forward_hook(halve)
        if patched and when == "before":
            memopt.patch(model)
        results.append(step_gradients(model, tiny_inputs("llama", 2, 16)))
    assert_close(results[1], results[0])


def test_global_hooks_see_every_module():
    calls = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: calls.append(type(module).__name__))
    try:
        counts = []
        for model in (tiny_model("llama"), memopt.patch(tiny_model("llama"))):
            calls.clear()
            model(**tiny_inputs("llama", 2, 8)).loss.backward()
            counts.append(sorted(calls))
    finally:
        handle.remove()
    assert counts[0] == counts[1]


def test_a_class_forward_that_is_replaced_later_is_the_one_that_runs(monkeypatch):
    model, stock = memopt.patch(tiny_model("llama")), tiny_model("llama")
    cls = type(stock.model.layers[0].mlp)
    monkeypatch.setattr(cls, "forward", lambda self, x: 2 * self.down_proj(self.up_proj(x)))
    inputs = tiny_inputs("llama", 2, 16)
    assert_close(step_gradients(model, inputs), step_gradients(stock, inputs))


def test_a_down_that_is_kept_in_fp32_gets_the_stock_cast():
    """transformers keeps T5's `wo` in fp32 where the rest is fp16."""
    model, stock = tiny_model("t5", torch.bfloat16), tiny_model("t5", torch.bfloat16)
    for each in (model, stock):
        for name, module in each.named_modules():
            if name.endswith("wo"):
                module.float()
    memopt.patch(model)
    inputs = tiny_inputs("t5", 2, 16)
    ours, theirs = step_gradients(model, inputs), step_gradients(stock, inputs)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        difference = (ours[name].float() - expected.float()).norm()
        assert difference <= 0.05 * expected.float().norm() + 1e-6, name


def test_a_checkpoint_around_a_part_of_a_block_works():
    from torch.utils.checkpoint import checkpoint

    results = []
    for model in stock_and_patched(lambda: tiny_model("bert")):
        for layer in model.bert.encoder.layer:
            inner = layer.intermediate.forward
            layer.intermediate.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
        results.append(step_gradients(model, tiny_inputs("bert", 2, 16)))
    assert_close(results[1], results[0])


@pytest.mark.parametrize("name", ["phi3", "llama"])
def test_batched_gradients_are_the_stock_ones(name):
    results = []
    for model in (tiny_model(name), memopt.patch(tiny_model(name))):
        mlp = model.model.layers[0].mlp
        torch.manual_seed(0)
        x = torch.randn(1, 3, model.config.hidden_size, requires_grad=True)
        y = mlp(x)
        directions = torch.eye(y.numel())[:4].view(4, *y.shape)
        results.append(torch.autograd.grad(y, x, directions, is_grads_batched=True)[0])
    torch.testing.assert_close(results[1], results[0])


def test_a_trace_records_the_stock_operations():
    model = memopt.patch(tiny_model("llama"))
    mlp = model.model.layers[0].mlp
    traced = torch.jit.trace(mlp, torch.randn(1, 3, model.config.hidden_size))
    assert "PythonOp" not in str(traced.graph)
    assert "GatedProduct" not in str(traced.graph)


def test_forward_mode_derivatives_are_the_stock_ones():
    import torch.autograd.forward_ad as forward_ad

    results = []
    for model in (tiny_model("llama"), memopt.patch(tiny_model("llama"))):
        torch.manual_seed(0)
        x, direction = torch.randn(2, 1, 3, model.config.hidden_size)
        with forward_ad.dual_level():
            y = model.model.layers[0].mlp(forward_ad.make_dual(x, direction))
            results.append(forward_ad.unpack_dual(y).tangent)
    torch.testing.assert_close(results[1], results[0])
