"""Chains of elementwise operations save what they begin with, and give stock's gradients."""

from __future__ import annotations

import contextlib
import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.patches.chains import module as patched_module
from memopt.patches.chains.module import followed_chains
from memopt.patches.chains.patch import PATCH
from memopt.patches.functions import patch_functions
from memopt.recompute import chains
from memopt.saved import RecomputeScope
from memopt.trace.account import account
from memopt.walk.aten.precision import precise
from memopt.walk.observe import walk_model

ROWS, WIDTH, WIDE = 24, 6, 32


class Chained(nn.Module):
    """Two products, and between them what `form` does to the result of the first one."""

    def __init__(self, form: Callable[[Chained, Tensor], Tensor], out: int = WIDE // 2) -> None:
        super().__init__()
        self.form = form
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.up, self.down = nn.Linear(WIDTH, WIDE).double(), nn.Linear(out, WIDTH).double()
            self.bias = nn.Parameter(torch.randn(1, out, dtype=torch.float64))
        self.act = nn.SiLU()
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.form(self, self.up(x)))
        return y


def interleaved(self: Chained, x: Tensor) -> Tensor:
    gate, up = x[..., ::2], x[..., 1::2]
    gate, up = gate.clamp(min=None, max=1.0), up.clamp(min=-1.0, max=1.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def chunked(self: Chained, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate.clamp(max=1.5), approximate="tanh") * torch.tanh(up).square() + self.bias


def cut(self: Chained, x: Tensor) -> Tensor:
    """The largest values of each row."""
    gate, up = x.split(WIDE // 2, -1)
    cutoff = gate.mean(-1, keepdim=True) + 0.3 * gate.std(-1, keepdim=True, unbiased=False)
    return self.act(F.relu(gate - cutoff)) * up


def softplus(self: Chained, x: Tensor) -> Tensor:
    g = x[:, : WIDE // 2].double() + self.bias.double()
    return -torch.exp(self.bias) * torch.where(g > 1.0, g, torch.log(1.0 + torch.exp(g)))


def masked(self: Chained, x: Tensor) -> Tensor:
    mask = torch.arange(WIDE) % 3 == 0
    y = 1.0 / (2.0 + torch.exp(-x).masked_fill(mask, 0.5)) ** 2
    return (y.unflatten(-1, (2, -1)).transpose(1, 2).reshape(-1, WIDE // 2, 2) * 2.0).unbind(-1)[1]


def detached(self: Chained, x: Tensor) -> Tensor:
    """What has no gradient in stock has none."""
    with torch.no_grad():
        scale = torch.sigmoid(x).mean(-1, keepdim=True)
    y = torch.exp(torch.tanh(x)) / torch.exp(torch.tanh(x)).detach()
    return (y * scale * torch.sigmoid(x * scale))[..., ::2]


def hooked(self: Chained, x: Tensor) -> Tensor:
    y = torch.sigmoid(torch.exp(torch.tanh(x)))
    if y.requires_grad:
        y.register_hook(lambda dy: self.seen.append(dy.clone()))
    z = torch.exp(y).sin() * y
    if z.requires_grad:
        z.retain_grad()
    self.kept = z
    return torch.tanh(z).exp()[..., 1::2]


def in_place(self: Chained, x: Tensor) -> Tensor:
    y = torch.sigmoid(torch.exp(torch.tanh(x)))
    y = y + 1.0
    y[:, :4] *= 3.0
    y += F.leaky_relu(torch.sin(x).exp() - 1.0, 0.3, True)
    return (torch.exp(torch.tanh(x)) * torch.sigmoid(y))[..., 1::2]


def changed_between(self: Chained, x: Tensor) -> Tensor:
    """Stock keeps the sigmoid's result; what it was made of changes."""
    y = torch.sigmoid(x)
    with torch.no_grad():
        x.mul_(2.0)
    return (torch.exp(torch.tanh(y)) * x)[..., ::2]


def twice(self: Chained, x: Tensor) -> Tensor:
    """One intermediate has several readers, one of them a product."""
    y = torch.exp(torch.tanh(torch.sigmoid(x)))
    return (y @ y.mT @ y + torch.log(y) * y)[..., ::2]


def scaled(self: Chained, x: Tensor) -> Tensor:
    """The parameters are as large as the product's result: they are not copied."""
    weight = self.bias.expand(ROWS, -1) * 1.0
    return torch.exp(torch.tanh(x[..., ::2])) * weight


FORMS = [interleaved, chunked, cut, softplus, masked, detached, hooked, in_place, changed_between, twice, scaled]
#: What saves less, and at least how many tensors as large as half the first product's result.
LESS = {interleaved: 2, chunked: 1, cut: 1, softplus: 1}


def both(form: Callable[[Chained, Tensor], Tensor]) -> tuple[Chained, Chained]:
    stock = Chained(form)
    patched = copy.deepcopy(stock)
    patch_functions(patched, followed_chains)
    return stock, patched


def draw() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()


def step(module: Any, x: Tensor, run: Callable[..., Tensor] | None = None) -> list[Tensor]:
    module.zero_grad()
    with RecomputeScope():
        y = module(x) if run is None else run(module, x)
    y.square().sum().backward()
    gradients = [each.grad for each in module.parameters() if each.grad is not None]
    return [y.detach(), x.grad, *gradients]  # type: ignore[list-item]


def assert_same(found: list[Tensor], expected: list[Tensor], rtol: float = 1e-11) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol * max(1.0, float(other.abs().max())))


WAYS = {
    "plain": None,
    "reentrant": lambda module, x: checkpoint(module, x, use_reentrant=True),
    "checkpointed": lambda module, x: checkpoint(module, x, use_reentrant=False),
    "without a scope": "",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_value_and_gradients_are_stocks(form: Any, way: str) -> None:
    stock, patched = both(form)
    run: Any = WAYS[way]
    if run == "":
        run = lambda module, x: module(x)  # noqa: E731
        found = [step_without_scope(each) for each in (patched, stock)]
        assert_same(*found)
        return
    found, expected = step(patched, draw(), run), step(stock, draw(), run)
    assert torch.equal(found[0], expected[0])
    assert_same(found, expected)
    if form is hooked and way == "plain":
        assert_same(patched.seen, stock.seen)
        assert_same([patched.kept.grad], [stock.kept.grad])
    first, second = step(patched, draw(), run), step(patched, draw(), run)
    assert all(map(torch.equal, found, first))
    assert all(map(torch.equal, first, second))


def step_without_scope(module: nn.Module) -> list[Tensor]:
    x = draw()
    module(x).square().sum().backward()
    return [x.grad, *(each.grad for each in module.parameters() if each.grad is not None)]  # type: ignore[list-item]


@pytest.mark.parametrize("form", LESS)
def test_what_they_begin_with_is_saved(form: Any) -> None:
    def bytes_of(module: nn.Module) -> int:
        def run() -> Tensor:
            with RecomputeScope():
                return module(draw()).sum()  # type: ignore[no-any-return]

        return account(module, run).total

    stock, patched = both(form)
    assert bytes_of(stock) - bytes_of(patched) >= LESS[form] * ROWS * (WIDE // 2) * 8 * 0.9


@pytest.mark.parametrize("form", [interleaved, chunked, cut, masked])
def test_under_autocast(form: Any) -> None:
    """Both round alike: what autocast casts, it casts again in backward."""
    results = []
    for module in both(form):
        module.float()
        x = draw().detach().float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16), RecomputeScope():
            y = module(x)
        y.float().square().sum().backward()
        results.append([y.detach(), x.grad, *(each.grad for each in module.parameters() if each.grad is not None)])
    assert all(map(torch.equal, results[0], results[1]))


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_left_when_the_step_is_done(form: Any) -> None:
    _, patched = both(form)
    step(patched, draw())
    patched.form = lambda self, x: form(self, kept(x))
    references: list[Any] = []

    def kept(x: Tensor) -> Tensor:
        references.append(weakref.ref(x.untyped_storage()))
        return x

    if form is hooked:  # it keeps a tensor of its own
        return
    step(patched, draw())
    assert references
    assert not any(each() is not None for each in references)


def test_frozen_factors_and_frozen_inputs() -> None:
    for frozen in ("up", "down", "bias", ""):
        results = []
        for module in both(chunked):
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(not name.startswith(frozen or "up"))
            x = draw().detach() if not frozen else draw()
            with RecomputeScope():
                module(x).square().sum().backward()
            results.append([each.grad for each in (x, *module.parameters()) if each.grad is not None])
        assert_same(*results)


def test_a_source_that_is_changed_before_backward_is_an_error() -> None:
    def changed(self: Chained, x: Tensor) -> Tensor:
        y = interleaved(self, x)
        x.mul_(2.0)
        return y

    for module in both(changed):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(module, draw())


def test_a_hook_on_a_child_keeps_the_stock_operations() -> None:
    _, patched = both(cut)
    captured: list[Tensor] = []
    patched.act.register_forward_hook(lambda module, args, output: captured.append(output))
    x = draw()
    with RecomputeScope():
        y = patched(x)
    captured[0].retain_grad()
    y.square().sum().backward()
    assert captured[0].grad is not None


def test_a_second_derivative_is_refused() -> None:
    _, patched = both(interleaved)
    x = draw()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(patched(x).sum(), x, create_graph=True)


def test_transforms_run_stock() -> None:
    stock, patched = both(interleaved)
    x = draw().detach()
    expected = torch.func.jacrev(stock)(x)
    torch.testing.assert_close(torch.func.jacrev(patched)(x), expected)
    torch.testing.assert_close(torch.func.vmap(patched)(x[None]), stock(x)[None])


def test_copies_and_pickles() -> None:
    _, patched = both(interleaved)
    expected = step(patched, draw())
    for again in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
        assert_same(step(again, draw()), expected)


def test_long_chains_end() -> None:
    """Two readers of each result double the chain with every operation."""

    def doubled(self: Chained, x: Tensor) -> Tensor:
        for _ in range(40):
            x = torch.tanh(x) * torch.sigmoid(x)
        return x[..., ::2]

    stock, patched = both(doubled)
    assert_same(step(patched, draw()), step(stock, draw()))


def test_a_parameter_may_be_freed_before_backward() -> None:
    """... as sharding frees those of other units."""
    stock, patched = both(softplus)
    expected = step(stock, draw())
    x = draw()
    with RecomputeScope():
        y = patched(x)
    patched.bias.data.fill_(9.0)  # no version shows it
    grads = torch.autograd.grad(y.square().sum(), [x, patched.bias])
    assert_same([grads[0], grads[1]], [expected[1], expected[2]])


# --- which modules ---------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.head = Inner(form), nn.Linear(WIDE // 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y = y if isinstance(y, Tensor) else y[0] + y[1]
        return self.head(y)  # type: ignore[no-any-return]


class Inner(nn.Module):
    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__()
        self.form, self.up, self.bias = form, nn.Linear(WIDTH, WIDE), nn.Parameter(torch.randn(1, WIDE // 2))

    def forward(self, x: Tensor) -> Any:
        return self.form(self, self.up(x))


def returned_inside(self: Any, x: Tensor) -> Any:
    y = torch.exp(torch.tanh(x.sigmoid()))[..., ::2]
    return y, torch.log(y + 1.0) * y


def changed_after(self: Any, x: Tensor) -> Tensor:
    y = torch.exp(torch.tanh(torch.sigmoid(x)))[..., ::2]
    x.zero_()
    return y


def a_sum(self: Any, x: Tensor) -> Tensor:
    return (x[..., ::2] + x[..., 1::2]) * 2.0 + self.bias  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("form", "found"),
    [(interleaved, True), (softplus, True), (returned_inside, False), (changed_after, False), (a_sum, False)],
)
def test_the_walk_finds_them_where_nothing_outside_sees_them(form: Any, found: bool) -> None:
    sites = walk_model(Model(form), {"x": torch.randn(ROWS, WIDTH)})
    assert ("inner" in sites.chained) is found


# --- models ----------------------------------------------------------------------------------------------------------


SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 48, "head_dim": 16, "use_cache": False, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2},
    "gemma3n_text": {
        "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
        "laurel_rank": 4, "activation_sparsity_pattern": [0.6, 0.0], "layer_types": ["full_attention"] * 2,
    },
    "kimi_linear": {
        "linear_num_heads": 2, "linear_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "moe_intermediate_size": 16, "topk_group": 1, "layer_types": ["linear_attention", "full_attention"],
        "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "first_k_dense_replace": 1,
    },
}  # fmt: skip
IDS = torch.arange(24).reshape(2, 12) * 7 % 64


def model_of(kind: str, implementation: str = "eager", dtype: torch.dtype = torch.float64) -> nn.Module:
    config = transformers.AutoConfig.for_model(kind, **SIZES | MODELS[kind])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=implementation)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    return model.to(dtype).train()  # type: ignore[no-any-return]


def gradients(model: nn.Module, autocast: bool = False) -> list[Tensor]:
    model.zero_grad()
    wide = contextlib.nullcontext() if autocast else precise(next(model.parameters()).dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), wide:
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


def chained(model: nn.Module) -> set[str]:
    rows = memopt.plan_for(model).entries
    return {row.site.rpartition(".")[2] for row in rows if row.kind == "chain" and row.action == "recompute"}


CASES = [
    *(("gpt_oss", each, "experts") for each in ("eager", "batched_mm", "grouped_mm")),
    ("gemma3n_text", "eager", "mlp"),
    ("kimi_linear", "eager", "forget_gate"),
]


@pytest.mark.parametrize("use_reentrant", [None, True, False])
@pytest.mark.parametrize(("kind", "implementation", "site"), CASES)
@pytest.mark.rotates(3)
def test_gradients_of_models_are_stocks(kind: str, implementation: str, site: str, use_reentrant: bool | None) -> None:
    dtype = torch.float32 if implementation == "grouped_mm" else torch.float64  # PyTorch has none in fp64
    stock = model_of(kind, implementation, dtype)
    assert chained(stock) == {site}
    patched = memopt.patch(copy.deepcopy(stock))
    if use_reentrant is not None:
        for each in (stock, patched):
            each.gradient_checkpointing_enable({"use_reentrant": use_reentrant})  # type: ignore[operator]
            each.enable_input_require_grads()  # type: ignore[operator]
    expected, found = gradients(stock), gradients(patched)
    assert_same(found, expected, 1e-4 if dtype is torch.float32 or kind == "kimi_linear" else 1e-10)
    assert all(map(torch.equal, found, gradients(patched)))


@pytest.mark.parametrize(("kind", "implementation", "site"), CASES)
@pytest.mark.rotates(3)
def test_models_save_less(kind: str, implementation: str, site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(kind, implementation, torch.float32)
    patched = memopt.patch(copy.deepcopy(model))
    found = account(patched, lambda: patched(input_ids=IDS, labels=IDS).loss).total
    monkeypatch.setattr(patched_module, "FOLLOWED", frozenset())
    without = account(patched, lambda: patched(input_ids=IDS, labels=IDS).loss).total
    assert found < without


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("trained", ["adapters", "router"])
@pytest.mark.rotates(3)
def test_adapted_and_frozen_experts(trained: str, implementation: str) -> None:
    dtype = torch.float32 if implementation == "grouped_mm" else torch.float64
    stock = model_of("gpt_oss", implementation, dtype)
    if trained == "adapters":
        names = ["experts.gate_up_proj", "experts.down_proj"]
        config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=names)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            stock = get_peft_model(stock, config, autocast_adapter_dtype=False)
            for name, parameter in stock.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(parameter, std=0.1)
    else:
        for name, parameter in stock.named_parameters():
            parameter.requires_grad_("experts" not in name)
    patched = memopt.patch(copy.deepcopy(stock))
    assert_same(gradients(patched), gradients(stock), 1e-4 if dtype is torch.float32 else 1e-10)


@pytest.mark.parametrize(("kind", "implementation", "site"), CASES)
def test_models_under_autocast(kind: str, implementation: str, site: str) -> None:
    truth = gradients(model_of(kind, "eager"))
    stock = model_of(kind, implementation, torch.float32)
    patched = memopt.patch(copy.deepcopy(stock))

    def error(model: nn.Module) -> float:
        found = gradients(model, autocast=True)
        return float(sum((a.double() - b).square().sum() for a, b in zip(found, truth, strict=True)))

    assert error(patched) <= 1.5 * error(stock)


class OfTwoHalves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(16, 32), nn.Linear(16, 16), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(self.act(h[..., ::2]) * h[..., 1::2])  # type: ignore[no-any-return]


class CheckpointsAChild(nn.Module):
    """Has a chain of its own, and checkpoints a child with another one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.a, self.b = OfTwoHalves(), nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        u, v = self.a(checkpoint(self.inner, x, use_reentrant=False)).chunk(2, -1)
        return self.b(torch.sin(u) * v)  # type: ignore[no-any-return]


def test_a_child_that_the_module_checkpoints_saves_the_same_in_both_runs() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.LayerNorm(16), CheckpointsAChild()), torch.randn(2, 12, 16)
    stock = copy.deepcopy(model)
    memopt.patch(model, inputs={"input": x})
    for each in (stock, model):
        each(x).square().mean().backward()
    for one, other in zip(stock.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)


def test_switched_off_with_activations() -> None:
    model = model_of("gpt_oss")
    plan = memopt.plan_for(model, memopt.load_recipe("exact-unfolded", ["activations.method=none"]))
    assert all(row.action == "keep" for row in plan.entries if row.kind == "chain")


def test_verify_counts_the_intermediates_as_freed_in_the_forward() -> None:
    plan = memopt.plan_for(model_of("gpt_oss"))
    assert set(PATCH.frees(plan)) == {f"model.layers.{i}.mlp.experts" for i in (0, 1)}


def test_a_plain_block_has_none() -> None:
    config = transformers.AutoConfig.for_model("llama", **SIZES)
    assert chained(transformers.AutoModelForCausalLM.from_config(config)) == set()


@pytest.fixture(autouse=True)
def measured_anew() -> None:
    chains._measured.clear()
