"""Post-norm modules hand both terms of their sum to the norm, and everything around it stays as it was.

There is no kernel on the CPU, so the modules are told that there is one: then the operator's reference makes the sum.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import memopt
from memopt.kernels.norm.function import ms_norm
from memopt.patches.apply import apply
from memopt.patches.norm import module as norm
from memopt.patches.sum_norm import module as sum_norm
from memopt.patches.sum_norm.module import SumNormRewrite
from memopt.patches.swap import is_swapped, swap_state
from memopt.plan.recipe import load_recipe
from tests.factories import tiny_inputs, tiny_model
from tests.support.compare import step_gradients

FIRST = "bert.encoder.layer.0.attention.output"
gradients = functools.partial(step_gradients, seed=3)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Makes the modules believe in a kernel, and counts how often a norm was given a sum's terms."""
    counts: Counter[str] = Counter()

    def counted(*args, **options):
        if len(args) == 8:  # the last is the second term
            counts["norm of a sum"] += 1
        return ms_norm(*args, **options)

    monkeypatch.setattr(norm, "ms_norm", counted)
    monkeypatch.setattr(sum_norm, "runs_triton", lambda *_: True)
    return counts


def gradients_with_written_sums(monkeypatch, model, inputs):
    """Gradients of the same patched model whose sums are tensors of their own."""
    with monkeypatch.context() as patch:
        patch.setattr(sum_norm, "runs_triton", lambda *_: False)
        return gradients(model, inputs)


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert torch.equal(ours[name], expected), name


def rewritten(model) -> list[nn.Module]:
    swapped = [module for module in model.modules() if is_swapped(module)]
    return [module for module in swapped if isinstance(swap_state(module), SumNormRewrite)]


@pytest.mark.parametrize("name", ["bert", "roberta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_bit_of_a_gradient_changes(name, dtype, calls, monkeypatch):
    model, inputs = memopt.patch(tiny_model(name, dtype, hidden_dropout_prob=0.2).train()), tiny_inputs(name, 2, 16)
    ours = gradients(model, inputs)
    assert calls["norm of a sum"] == 2 * model.config.num_hidden_layers
    assert_equal(ours, gradients_with_written_sums(monkeypatch, model, inputs))


@pytest.mark.parametrize("name", ["gpt2", "vit", "llama", "t5", "opt"])
def test_a_block_with_the_norm_before_its_branch_stays_as_it_is(name):
    assert not rewritten(memopt.patch(tiny_model(name)))


def test_without_a_kernel_the_stock_forward_runs(monkeypatch):
    model, inputs = memopt.patch(tiny_model("bert")), tiny_inputs("bert", 2, 16)
    monkeypatch.setattr(sum_norm, "norm_of_sum", lambda *_: pytest.fail("the stock forward should run"))
    assert rewritten(model)
    gradients(model, inputs)


@pytest.mark.parametrize("mode", ["no_grad", "functional"])
def test_where_nothing_is_recorded_the_stock_forward_runs(mode, calls):
    model, inputs = memopt.patch(tiny_model("bert")), tiny_inputs("bert", 2, 16)
    if mode == "no_grad":
        with torch.no_grad():
            model(**inputs)
    else:
        output, x = model.get_submodule(FIRST), torch.randn(2, 64)
        torch.func.grad(lambda t: output(t, x).sum())(x)
    assert not calls


def test_adapters_on_dense_are_called(calls, monkeypatch):
    config = LoraConfig(r=4, target_modules=["dense"], init_lora_weights=False)
    model = memopt.patch(get_peft_model(tiny_model("bert"), config))
    inputs = tiny_inputs("bert", 2, 16)
    ours = gradients(model, inputs)
    assert any("lora_B" in name for name in ours)
    assert calls["norm of a sum"] == 2 * model.config.num_hidden_layers
    assert_equal(ours, gradients_with_written_sums(monkeypatch, model, inputs))


@pytest.mark.parametrize("child", ["dense", "dropout", "LayerNorm"])
def test_a_hook_on_a_child_is_called_once(child, calls):
    model, inputs = memopt.patch(tiny_model("bert")), tiny_inputs("bert", 2, 16)
    seen = []
    model.get_submodule(f"{FIRST}.{child}").register_forward_hook(lambda *_: seen.append(child))
    gradients(model, inputs)
    assert seen == [child]
    assert calls["norm of a sum"] == 2 * model.config.num_hidden_layers - (child == "LayerNorm")


def test_the_hook_of_a_norm_sees_the_sum(calls):
    model = memopt.patch(tiny_model("bert"))
    output, seen = model.get_submodule(FIRST), []
    output.LayerNorm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    hidden, residual = torch.randn(2, 3, 64), torch.randn(2, 3, 64)
    output(hidden, residual)
    assert torch.equal(seen[0], output.dense(hidden) + residual)
    assert not calls


@pytest.mark.parametrize("by_name", [False, True])
def test_arguments_may_be_given_by_name_and_in_any_order(by_name, calls):
    output = memopt.patch(tiny_model("bert")).get_submodule(FIRST)
    hidden, residual = torch.randn(2, 3, 64), torch.randn(2, 3, 64)
    expected = output.LayerNorm(output.dense(hidden) + residual)
    given = output(input_tensor=residual, hidden_states=hidden) if by_name else output(hidden, input_tensor=residual)
    assert torch.equal(given, expected)
    assert calls["norm of a sum"] == 1


def test_a_wrong_call_fails_as_it_does_in_the_stock_model(calls):
    output, x = memopt.patch(tiny_model("bert")).get_submodule(FIRST), torch.randn(2, 3, 64)
    for args, kwargs in (((x,), {}), ((x, x), {"input_tensor": x}), ((x,), {"other": x}), ((x, x, x), {})):
        with pytest.raises(TypeError, match="argument"):
            output(*args, **kwargs)


@pytest.mark.parametrize(
    "residual",
    [torch.randn(1, 3, 64), torch.randn(2, 3, 64, dtype=torch.float64), torch.randn(2, 3, 64).bfloat16()],
    ids=["shape", "fp64", "bf16"],
)
def test_terms_of_other_shapes_and_dtypes_are_added(residual, calls):
    stock = tiny_model("bert")
    patched = memopt.patch(copy.deepcopy(stock))
    for model in (stock, patched):
        model.get_submodule(f"{FIRST}.LayerNorm").to(torch.promote_types(residual.dtype, torch.float32))
    hidden, results = torch.randn(2, 3, 64), []
    for model in (stock, patched):
        residual = residual.detach().requires_grad_()
        y = model.get_submodule(FIRST)(hidden, residual)
        results.append((y, torch.autograd.grad((y * torch.arange(64)).sum(), residual)[0]))
    (stock_y, stock_dx), (y, dx) = results
    assert y.dtype == stock_y.dtype
    torch.testing.assert_close(y, stock_y)
    torch.testing.assert_close(dx, stock_dx)
    assert not calls


def test_parameters_of_another_dtype_than_the_sum_are_left_to_the_norm(calls):
    stock = tiny_model("bert", torch.bfloat16)
    stock.get_submodule(f"{FIRST}.LayerNorm").float()
    patched = memopt.patch(copy.deepcopy(stock))
    x = torch.randn(2, 3, 64).bfloat16()
    ours, theirs = (model.get_submodule(FIRST)(x, x) for model in (patched, stock))
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)
    assert not calls


def test_under_autocast_terms_of_two_dtypes_are_added(calls, monkeypatch):
    model, inputs = memopt.patch(tiny_model("bert")), tiny_inputs("bert", 2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = gradients(model, inputs), gradients_with_written_sums(monkeypatch, model, inputs)
    assert_equal(ours, theirs)


def test_a_frozen_model_behind_trained_embeddings_gets_its_gradients(calls, monkeypatch):
    model, inputs = memopt.patch(tiny_model("bert")), tiny_inputs("bert", 2, 16)
    model.bert.encoder.requires_grad_(False)
    ours = gradients(model, inputs)
    assert calls["norm of a sum"] == 2 * model.config.num_hidden_layers
    assert_equal(ours, gradients_with_written_sums(monkeypatch, model, inputs))


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing_too(reentrant, calls, monkeypatch):
    model, inputs = memopt.patch(tiny_model("bert", hidden_dropout_prob=0.2).train()), tiny_inputs("bert", 2, 16)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    ours = gradients(model, inputs)
    assert calls["norm of a sum"] >= 2 * model.config.num_hidden_layers
    assert_equal(ours, gradients_with_written_sums(monkeypatch, model, inputs))


def test_copies_are_patched_and_unpatching_gives_the_stock_forward_back(calls):
    model = memopt.patch(tiny_model("bert"))
    assert len(rewritten(copy.deepcopy(model))) == len(rewritten(model)) == 2 * model.config.num_hidden_layers
    memopt.unpatch(model)
    assert not rewritten(model)
    gradients(model, tiny_inputs("bert", 2, 16))
    assert not calls


@pytest.mark.parametrize("change", ["norms.method=none", f"ignore=[{FIRST}.LayerNorm]"])
def test_a_norm_that_is_left_alone_is_called_on_the_sum(change):
    model = tiny_model("bert")
    applied = apply(model, memopt.plan_for(model, load_recipe("exact-unfolded", [change])))
    assert FIRST not in applied.done.get("sum_norm", ())
    assert len(applied.done.get("sum_norm", ())) == (0 if "none" in change else 2 * model.config.num_hidden_layers - 1)


def test_outside_of_blocks_the_scope_around_the_module_holds(calls, monkeypatch):
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.output, self.score = tiny_model("bert").get_submodule(FIRST), nn.Linear(64, 3)

        def forward(self, x):
            return self.score(self.output(x, x))

    model = Head()
    plan = memopt.plan_for(model, inputs={"x": torch.randn(2, 3, 64)})
    assert apply(model, plan).done["sum_norm"] == ("output",)
    x, results = torch.randn(2, 3, 64, requires_grad=True), []
    for kernel in (True, False):
        monkeypatch.setattr(sum_norm, "runs_triton", lambda *_, kernel=kernel: kernel)
        results.append(torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()]))
    assert calls["norm of a sum"] == 1
    assert all(map(torch.equal, *results))


def test_a_module_that_is_a_block_itself_saves_no_output_that_can_be_recomputed(calls):
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(tiny_model("bert").get_submodule(FIRST) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x, x)
            return x

    model, x = Stack(), torch.randn(2, 3, 64)
    plan = memopt.plan_for(model, inputs={"x": x})
    applied = apply(model, plan)
    assert applied.done.get("sum_norm", ()) == plan.sites.blocks == ("layers.0", "layers.1", "layers.2")
    first, kept = model.layers[0](x, x), []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    pack.memopt_observer = True
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
    assert calls["norm of a sum"] == 4
    assert kept
    assert not any(torch.equal(tensor.flatten(), first.flatten()) for tensor in kept)
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
