"""Adapters on experts, whose weights are one parameter: PEFT adds a product to it, and the model recomputes the sum."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrize

import memopt
from memopt.patches.apply import is_patched
from memopt.patches.swap import is_swapped, swap_state
from memopt.torch_compat import TorchDispatchMode
from memopt.trace.account import account
from memopt.walk.aten.precision import precise
from tests.support.expert_models import IDS, assert_same, gradients
from tests.support.versions import needs

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1,
    "intermediate_size": 48, "head_dim": 16, "num_experts_per_tok": 2, "use_cache": False, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 48},
    "GptOss": {"num_local_experts": 4},
}
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")


def base(family="Mixtral", implementation="eager", dtype=torch.float64):
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=implementation)
        return model.to(dtype).train()


def adapted(model, *, fp32=False, name=None):
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"], target_parameters=list(EXPERTS))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        if name is None:
            model = get_peft_model(model, config, autocast_adapter_dtype=fp32)
        else:
            model.add_adapter(name, config)
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                nn.init.normal_(parameter, std=0.1)
    return model


def stock_and_patched(family="Mixtral", implementation="eager", dtype=torch.float64, **options):
    stock = adapted(base(family, implementation, dtype), **options)
    return stock, memopt.patch(copy.deepcopy(stock))


def saved(model):
    return account(model, lambda: model(input_ids=IDS, labels=IDS).loss)


def saves_a_sum(model):
    """Whether a weight of experts is saved, of all or of one, cast or not."""
    weights = {parameter.shape[1:] for parameter in model.parameters() if parameter.dim() == 3}
    return any(each.shape[-2:] in weights for each in saved(model).storages)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.rotates(3)
def test_no_sum_of_weight_and_adapter_is_saved_and_gradients_are_stocks(family, implementation):
    grouped = implementation == "grouped_mm"  # PyTorch has none in fp64
    stock, patched = stock_and_patched(family, implementation, torch.float32 if grouped else torch.float64)
    assert saves_a_sum(stock)
    assert not saves_a_sum(patched)
    # fp32: both recompute to the bit, and sum in the same order but for norms.
    assert_same(gradients(patched), gradients(stock), 2e-5 if grouped else 1e-10)


def test_bf16_gradients_are_as_right_as_stocks():
    truth = gradients(adapted(base().bfloat16().double()))
    stock, patched = stock_and_patched("Mixtral", "grouped_mm", torch.bfloat16)

    def error(model):
        found = gradients(model)
        return sum((found[name].double() - each).square().sum() for name, each in truth.items()).sqrt()

    assert error(patched) <= 1.25 * error(stock)


def test_adapters_may_come_after_the_patch():
    """... when scopes have found out that they have nothing to do."""
    model = memopt.patch(base())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.model.embed_tokens.weight.requires_grad_(True)
    gradients(model)
    model = adapted(model)
    assert not saves_a_sum(model)
    assert_same(gradients(model), gradients(adapted(base())))


class Sums(TorchDispatchMode):
    """Counts the sums of weight and product, backward's included."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.baddbmm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_gated_mlps_that_the_recipe_leaves_are_left_in_every_call(family, implementation):
    """Experts are a scope of fewer families then, inside of their block's."""
    recipe = memopt.load_recipe("exact-unfolded", ["gated_mlps.method=none"])
    stock = base(family, implementation, torch.float32)
    patched = memopt.patch(copy.deepcopy(stock), recipe)
    first, second = saved(patched), saved(patched)
    assert first.total == second.total
    for use_reentrant in (True, False):
        for model in (stock, patched):
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        assert_same(gradients(patched), gradients(stock), 2e-5)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_under_activation_checkpointing(use_reentrant, implementation):
    results, counts = [], []
    for model in stock_and_patched(implementation=implementation):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        with Sums() as sums:
            results.append(gradients(model))
        counts.append(sums.count)
    assert_same(results[1], results[0])
    assert counts[1] == counts[0]  # not once more while the block runs again


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_with_adapters_in_fp32(dtype, implementation):
    truth = gradients(adapted(base().to(dtype).double()))
    errors = []
    for model in stock_and_patched("Mixtral", implementation, dtype, fp32=True):
        with torch.autocast("cpu", torch.bfloat16):
            assert saves_a_sum(model) is not is_patched(model)
            found = gradients(model)
        errors.append(sum((found[name].double() - each).square().sum() for name, each in truth.items()).sqrt())
    assert errors[1] <= 1.25 * errors[0]


def test_two_backwards_of_a_retained_graph():
    _, model = stock_and_patched()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(first[name], p.grad) for name, p in model.named_parameters() if p.grad is not None)


def test_a_sum_is_freed_with_its_last_reader():
    """When the gradient of the hidden states leaves the block, no sum is alive."""
    _, model = stock_and_patched()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" in name)
    norm, alive = model.base_model.model.model.layers[0].post_attention_layernorm, []
    norm.register_forward_hook(lambda module, given, y: y.register_hook(lambda dy: alive.append(sums())) and None)
    model.base_model.model.model.embed_tokens.weight.requires_grad_(True)

    def sums():
        node = holder["node"]
        return node.metadata["memopt"].as_produced() is not None

    holder = {}
    experts = model.base_model.model.model.layers[0].mlp.experts.get_base_layer()
    experts.register_forward_hook(lambda module, *_: holder.update(node=module.gate_up_proj.grad_fn))
    gradients(model)
    assert alive == [False]


def test_several_adapters_one_switched_off_and_a_merge():
    stock, patched = stock_and_patched()
    for model in (stock, patched):
        adapted(model, name="second")
        model.set_adapter("second")
    assert not saves_a_sum(patched)
    assert_same(gradients(patched), gradients(stock))
    for model in (stock, patched):
        model.base_model.set_adapter(["default", "second"])
    with pytest.warns(UserWarning, match=r"MixtralExperts computes its gate_up_proj anew .* one adapter at a time"):
        assert_same(gradients(patched), gradients(stock))
    with stock.disable_adapter(), patched.disable_adapter():
        for model in (stock, patched):
            model.base_model.model.model.embed_tokens.weight.requires_grad_(True)
        assert_same(gradients(patched), gradients(stock))
    stock, patched = stock.merge_and_unload(), patched.merge_and_unload()
    for model in (stock, patched):
        model.requires_grad_(True)
    assert_same(gradients(patched), gradients(stock))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_recompute_too(duplicate):
    _, model = stock_and_patched()
    expected = gradients(model)
    clone = duplicate(model)
    assert not saves_a_sum(clone)
    assert_same(gradients(clone), expected)
    assert not any(map(is_swapped, memopt.unpatch(clone).modules()))


def test_forwards_between_a_forward_and_its_backward():
    """PyTorch counts every parametrisation as a change of the weight."""
    results = []
    for model in stock_and_patched():
        with precise(torch.float64):
            losses = [model(input_ids=ids, labels=ids).loss for ids in (IDS, IDS.flip(0))]
            with torch.no_grad():
                model(input_ids=IDS)
            sum(losses).backward()
        results.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert_same(results[1], results[0])


@pytest.mark.parametrize("forwards", [0, 1])
def test_a_weight_that_is_changed_before_backward_is_an_error(forwards):
    _, model = stock_and_patched()
    loss = model(input_ids=IDS, labels=IDS).loss
    with torch.no_grad():
        model.base_model.model.model.layers[0].mlp.experts.get_base_layer().down_proj.mul_(2)
    for _ in range(forwards):
        model(input_ids=IDS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Doubled(nn.Module):
    """A product added to something else than the weight."""

    def __init__(self, left, right):
        super().__init__()
        self.left, self.right = nn.Parameter(left), nn.Parameter(right)

    def forward(self, weight):
        return torch.baddbmm(weight.detach() * 2, self.left, self.right)


def test_a_sum_of_something_else_than_the_weight_is_saved():
    model = memopt.patch(base())
    model.requires_grad_(False)
    experts = model.model.layers[0].mlp.experts
    count, rows, columns = experts.down_proj.shape
    left, right = torch.randn(count, rows, 2, dtype=torch.float64), torch.randn(count, 2, columns, dtype=torch.float64)
    parametrize.register_parametrization(experts, "down_proj", Doubled(left, right))
    experts.parametrizations.down_proj.original.requires_grad_(False)
    with parametrize.cached():
        ours = gradients(model)
    assert not swap_state(experts).proven
    with parametrize.cached():
        assert_same(ours, gradients(memopt.unpatch(model)))


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class ListOfExperts(nn.Module):
    """As models with code of their own have them: each expert looks for its tokens."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(32, 4), nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x):
        rows = x.reshape(-1, 32)
        weights, chosen = self.gate(rows).softmax(-1).topk(2, -1)
        sums = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            tokens, place = (chosen == index).nonzero(as_tuple=True)
            sums = sums.index_add(0, tokens, expert(rows[tokens]) * weights[tokens, place, None])
        return sums.reshape(x.shape)


@pytest.mark.filterwarnings("error:memopt could observe little")
def test_experts_in_a_list_are_found_with_adapters_too():
    model = base()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model.model.layers[0].mlp = ListOfExperts().double()
        config = LoraConfig(r=4, target_modules=["gate_proj", "up_proj", "down_proj"], init_lora_weights=False)
        model = get_peft_model(model, config, autocast_adapter_dtype=False)
    before, expected = saved(model).saved, gradients(model)
    memopt.patch(model)
    assert "4 gated MLPs: 4 recomputed" in str(memopt.summary(model))
    assert_same(gradients(model), expected)
    assert saved(model).saved < 0.8 * before


@needs("transformers", "5.23", "saves more around the products of its experts")
def test_experts_save_what_as_many_dense_mlps_do_within_a_tenth():
    """Each token passes two experts, which are as wide as the dense model's MLP."""
    sizes = SIZES | {"hidden_size": 128, "head_dim": 64, "intermediate_size": 448}
    shares = []
    for family, own in (("Llama", {}), ("Mixtral", {"num_local_experts": 8})):
        config = getattr(transformers, f"{family}Config")(**sizes | own)
        model = transformers.AutoModelForCausalLM.from_config(config)  # experts as they are trained: grouped_mm
        adapters = LoraConfig(r=2, target_modules="all-linear", target_parameters=list(EXPERTS) if own else None)
        model = memopt.patch(get_peft_model(model.bfloat16().train(), adapters, autocast_adapter_dtype=False))
        counted = account(model, lambda model=model: model(input_ids=IDS.repeat(8, 8), labels=IDS.repeat(8, 8)).loss)
        mlp = "post_attention_layernorm", "mlp"
        shares.append(sum(each.nbytes for each in counted.storages if any(part in each.savers[0][0] for part in mlp)))
    assert shares[1] <= 1.1 * config.num_experts_per_tok * shares[0]
