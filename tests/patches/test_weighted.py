"""Experts behind a router, and shared ones behind a gate: no output of theirs is saved for the weights' gradient."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

import memopt
from memopt.kernels.linear.weighted import WeightedFunction
from memopt.patches.linear import weighted
from memopt.torch_compat import TorchDispatchMode, storage_id, tree_leaves
from memopt.trace.account import account
from memopt.walk.aten.precision import precise
from tests.support import expert_models
from tests.support.expert_models import IDS, gradients

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 48, "head_dim": 32, "num_experts_per_tok": 2, "use_cache": False, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 48},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48},
    "GptOss": {"num_local_experts": 4},
    "DeepseekV3": {
        "n_routed_experts": 4, "moe_intermediate_size": 48, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
        "head_dim": 8,
    },
}  # fmt: skip
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
ROUTERS = ("mlp.gate.weight", "mlp.router", "shared_expert_gate")


def base(family="Qwen3Moe", implementation="eager", dtype=torch.float64, **sizes):
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES.get(family, {}) | sizes)
    options = {"experts_implementation": implementation} if family in FAMILIES else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, **options)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 3 or "bias" in name or any(part in name for part in ROUTERS):
                nn.init.normal_(parameter, std=0.1)
        return model.to(dtype).train()


def full(model):
    return model


def frozen_experts(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)
    return model


def lora(model):
    """On attention, experts and shared experts, beside routers that are trained."""
    names = "experts.gate_up_proj", "experts.down_proj"
    config = LoraConfig(r=4, target_modules=["q_proj", "q_b_proj", "down_proj"], target_parameters=list(names))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = get_peft_model(model, config, autocast_adapter_dtype=False)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
            parameter.requires_grad_(parameter.requires_grad or any(part in name for part in ROUTERS))
    return model


WAYS = {"full": full, "frozen experts": frozen_experts, "LoRA": lora}


def assert_same(ours, stock, tolerance=1e-11):
    assert any(part in name for name in ours for part in ROUTERS)
    expert_models.assert_same(ours, stock, tolerance)


@pytest.fixture
def weighed(monkeypatch):
    """The shapes of the outputs that were weighted without being saved."""
    shapes, stock = [], weighted.weighted
    monkeypatch.setattr(weighted, "weighted", lambda y, *rest: shapes.append(y.shape) or stock(y, *rest))
    return shapes


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])  # PyTorch has no grouped product in fp64
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.rotates(3)
def test_gradients_are_stocks_in_fp64(family, way, implementation, weighed):
    stock = WAYS[way](base(family, implementation))
    patched = memopt.patch(copy.deepcopy(stock))
    assert_same(gradients(patched), gradients(stock))
    assert sum(shape[0] for shape in weighed) >= 2 * IDS.numel() * 2  # two experts of each token, in two layers


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.rotates(3)
def test_bf16_gradients_are_as_right_as_stocks(family, way, implementation, weighed):
    """Of routers, and of everything; against fp64, whose routes the experts' rounding may not change here."""
    stock = WAYS[way](base(family, implementation, torch.bfloat16))
    truth = gradients(WAYS[way](base(family, "eager", torch.bfloat16).double()))
    errors = []
    for model in (memopt.patch(copy.deepcopy(stock)), stock):
        found = gradients(model)
        for part in ("", *ROUTERS):
            names = [name for name in truth if part in name]
            errors.append(sum((found[name].double() - truth[name]).square().sum() for name in names) ** 0.5)
    assert weighed
    half = len(errors) // 2
    assert all(mine <= 1.25 * its for mine, its in zip(errors[:half], errors[half:], strict=True)), errors


class Live(TorchDispatchMode):
    """The storages that were made inside and live."""

    def __init__(self):
        super().__init__()
        self.nbytes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for each in tree_leaves(output):
            if isinstance(each, torch.Tensor) and (key := storage_id(each.untyped_storage())) not in self.nbytes:
                self.nbytes[key] = each.untyped_storage().nbytes()
                weakref.finalize(each.untyped_storage(), self.nbytes.pop, key, None)
        return output


def live_bytes_of_a_block(family, implementation, **sizes):
    found = []
    for layers in (2, 3):
        model = base(family, implementation, torch.bfloat16, num_hidden_layers=layers, **sizes)
        memopt.patch(model)
        gradients(model)
        parameters = {storage_id(each.untyped_storage()) for each in model.parameters()}
        with Live() as live:
            hidden = model.model(input_ids=IDS.repeat(1, 8), use_cache=False).last_hidden_state
        found.append(sum(nbytes for key, nbytes in live.nbytes.items() if key not in parameters))
        del hidden
    return found[1] - found[0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_block_keeps_what_one_with_a_dense_mlp_does(implementation):
    """... as wide as the experts of a token together: their gate and up, and nothing of the width of the block."""
    sizes, tokens, experts, chosen, wide = {"hidden_size": 256, "head_dim": 128}, 320, 4, 2, 96
    dense = live_bytes_of_a_block("Qwen3", None, **sizes, intermediate_size=chosen * wide)
    ours = live_bytes_of_a_block("Qwen3Moe", implementation, **sizes, moe_intermediate_size=wide)
    routing = tokens * (experts * 4 + chosen * (8 * 8 + 2 * 4))  # probabilities; indices, weights
    # Made for each token's expert: its input, and copies of the expert's weights.
    copies = tokens * chosen * (1 + 3 * wide) * 256 * 2 if implementation == "batched_mm" else 0
    assert ours <= dense + routing + copies
    assert tokens * chosen * 256 * 2 > 2 * routing  # one output more would show


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_without_gradients_it_is_stock_to_the_bit(implementation, weighed):
    stock = base("Qwen2Moe", implementation, torch.bfloat16).eval()
    patched = memopt.patch(copy.deepcopy(stock))
    with torch.no_grad():
        assert torch.equal(patched(input_ids=IDS).logits, stock(input_ids=IDS).logits)
    assert not weighed


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.rotates(3)
def test_under_activation_checkpointing(way, use_reentrant, implementation, weighed):
    stock = WAYS[way](base("Qwen2Moe", implementation))
    patched = memopt.patch(copy.deepcopy(stock))
    patched.enable_input_require_grads()
    expected = gradients(patched)
    patched.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    weighed.clear()
    assert_same(gradients(patched), expected)
    assert_same(gradients(patched), gradients(stock))
    assert weighed


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(dtype, implementation, weighed):
    truth = gradients(base("Qwen2Moe", dtype=dtype).double())
    errors = []
    for patches in (True, False):
        model = base("Qwen2Moe", implementation, dtype)
        if patches:
            memopt.patch(model)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        found = {name: p.grad.double() for name, p in model.named_parameters()}
        errors.append(sum((found[name] - each).square().sum() for name, each in truth.items()) ** 0.5)
    assert weighed
    assert errors[0] <= 1.25 * errors[1]


@pytest.mark.parametrize("family", ["Qwen2Moe", "GptOss"])
def test_two_backwards_of_a_retained_graph(family):
    model = memopt.patch(base(family))
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(first[name], p.grad) for name, p in model.named_parameters())


@pytest.mark.parametrize("child", ["shared_expert", "shared_expert.down_proj"])
def test_an_output_that_a_hook_captures_has_its_gradient(child):
    results = []
    for patches in (True, False):
        model, captured = base("Qwen2Moe"), []
        if patches:
            memopt.patch(model)
        module = model.model.layers[1].mlp.get_submodule(child)
        module.register_forward_hook(lambda module, given, y, captured=captured: captured.append(y))
        with precise(torch.float64):
            loss = model(input_ids=IDS, labels=IDS).loss
            results.append(torch.autograd.grad(loss, captured))
    assert (results[0][0] - results[1][0]).norm() <= 1e-11 * results[1][0].norm()


def test_a_weight_that_is_changed_before_backward_is_an_error():
    model = memopt.patch(base())
    loss = model(input_ids=IDS, labels=IDS).loss
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("reads", [True, False])
def test_rows_that_are_added_up_are_saved_where_their_values_are_read(reads, monkeypatch):
    """Another release of PyTorch may read them in backward; this one only their shape."""
    assert weighted._adding_reads_shape_only()
    monkeypatch.setattr(weighted, "_adding_reads_shape_only", lambda: not reads)
    model = memopt.patch(base())
    shapes = [each.shape for each in account(model, lambda: model(input_ids=IDS, labels=IDS).loss).storages
              if any("index_add" in saver for saver in each.savers)]  # fmt: skip
    assert any(shape[-1] == 64 for shape in shapes) is reads
    assert_same(gradients(model), gradients(base()))


def test_compiled_experts_run_stock_operations(weighed):
    torch._dynamo.reset()
    stock = base("Qwen2Moe", "grouped_mm", torch.bfloat16)
    patched = memopt.patch(copy.deepcopy(stock))
    layers = [torch.compile(model.model.layers[0].mlp, backend="aot_eager") for model in (patched, stock)]
    x, dy = torch.randn(2, 40, 64).bfloat16(), torch.randn(2, 40, 64).bfloat16()
    found = []
    for layer in layers:
        given = x.clone().requires_grad_()
        layer(given).backward(dy)
        found.append(given.grad)
    assert torch.equal(*found)
    assert not weighed


class Mixed(nn.Module):
    """What may stand between a product and its weights: a sum that is as large, an output that is changed, a copy."""

    def __init__(self, what):
        super().__init__()
        self.what, self.down, self.gate = what, nn.Linear(8, 16), nn.Linear(8, 1)

    def forward(self, x):
        y, s = self.down(x), self.gate(x).sigmoid()
        if self.what == "a sum":
            return (y + x.repeat(1, 2)) * s
        if self.what == "changed in place":
            return y.tanh_() * s
        if self.what == "in another order":
            return y.flip(0) * s
        if self.what == "in another shape":
            return y.view(-1, 8) * s.repeat(2, 1)
        if self.what == "a narrower copy":
            return y.half() * s
        if self.what == "weights of channels":
            return y * s.repeat(1, 16)
        if self.what == "weights without a gradient":
            return y * s.detach() + 0 * s
        if self.what == "twice":
            return y * s + y * s.exp()
        return s * y.unsqueeze(0).squeeze(0)  # followed


@pytest.mark.parametrize(
    ("what", "count"),
    [
        ("a sum", 0), ("changed in place", 0), ("in another order", 0), ("in another shape", 0),
        ("a narrower copy", 0), ("weights of channels", 0), ("weights without a gradient", 0),
        ("twice", 2), ("followed", 1),
    ],
)  # fmt: skip
def test_what_is_no_product_any_more_is_left_to_pytorch(what, count, weighed):
    module, x = Mixed(what).double(), torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    inputs = [x, *module.parameters()]
    expected = torch.autograd.grad(module(x).double().square().sum(), inputs)
    with weighted.weighted_products(module, ()):
        z = module(x)
    found = torch.autograd.grad(z.double().square().sum(), inputs)
    assert len(weighed) == count
    for mine, its in zip(found, expected, strict=True):
        assert (mine - its).norm() <= 1e-13 * its.norm()


def test_what_is_weighted_is_nothing_in_another_thread_or_afterwards():
    module = Mixed("followed")
    with weighted.weighted_products(module, ()):
        assert isinstance(weighted.weighted_products(module, ()), type(weighted.nullcontext()))
        z = module(torch.randn(6, 8, requires_grad=True))
    assert z.grad_fn.name() == WeightedFunction.__name__ + "Backward"
    assert weighted.followed.products is None


def gemma3n() -> nn.Module:
    """The model itself multiplies outputs of linears with weights, around its blocks."""
    config = transformers.Gemma3nTextConfig(
        vocab_size=64, vocab_size_per_layer_input=64, hidden_size=32, hidden_size_per_layer_input=8,
        num_hidden_layers=2,
        intermediate_size=[64, 64], num_attention_heads=2, num_key_value_heads=1, head_dim=16, laurel_rank=4,
        num_kv_shared_layers=0, activation_sparsity_pattern=[0.0, 0.0], layer_types=["full_attention"] * 2,
        sliding_window=8, use_cache=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.Gemma3nForCausalLM(config).train()


@pytest.mark.parametrize("by", ["recipe", "the model's switch", "reentrant"])
def test_blocks_inside_of_the_module_that_multiplies_may_be_checkpointed(by: str) -> None:
    stock, ours = gemma3n(), gemma3n()
    settings = ["checkpointing.method=full"] if by == "recipe" else []
    memopt.patch(ours, memopt.load_recipe("exact-unfolded", settings))
    if by != "recipe":
        ours.gradient_checkpointing_enable({"use_reentrant": by == "reentrant"})
    for _ in range(2):
        mine, theirs = gradients(ours, IDS), gradients(stock, IDS)
        assert mine.keys() == theirs.keys()
        largest = max(each.norm() for each in theirs.values())
        for name, each in theirs.items():
            assert (mine[name] - each).norm() <= 1e-5 * each.norm() + 1e-6 * largest, name
