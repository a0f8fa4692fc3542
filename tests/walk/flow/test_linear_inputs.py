"""Who else keeps a linear's input: on known models against what autograd keeps of real tensors, on toys one by one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memopt.trace.account import account
from memopt.walk.models.build import build_meta, clone_to_meta
from memopt.walk.observe import find_sites, walk_config, walk_model
from memopt.walk.sites import Sites
from tests.factories import tiny_config, tiny_inputs, tiny_model

WIDTH = 8

_LINEARS = {"linear", "addmm", "conv2d"}
_RELU = {"feed_forward_proj": "relu", "attn_implementation": "eager"}  # attention's bias has a gradient: no CPU kernel

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama eager": ("llama", {"attn_implementation": "eager"}),
    "bert": ("bert", {}),
    "bert eager": ("bert", {"attn_implementation": "eager"}),
    "gpt2": ("gpt2", {}),
    "t5": ("t5", _RELU),
    "t5 with dropout": ("t5", {**_RELU, "dropout_rate": 0.1}),
    "t5 gated": ("t5", {"attn_implementation": "eager"}),
    "opt": ("opt", {}),
    "vit": ("vit", {}),
}


def saved_by(sites: Sites) -> dict[str, tuple[str, ...]]:
    """What else saves the input, by linear; known of all of them."""
    assert not [note for note in sites.notes if "is not known" in note]
    return {linear.parameter.removesuffix(".weight"): linear.saved_by for linear in sites.linears}


def really_saved_by(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, set[str]]:
    """The same of one real training forward, for the linears that keep their input."""
    held: dict[str, set[str]] = {}
    for kept in account(model, lambda: model(**inputs)).storages:
        linears = {module for module, operation in kept.savers if operation in _LINEARS}
        others = {f"{operation} in {module}" for module, operation in kept.savers if operation not in _LINEARS}
        held.update(dict.fromkeys(linears, others))
    return held


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.rotates(3)
def test_what_else_saves_an_input_is_that_of_real_tensors(family: str) -> None:
    name, settings = FAMILIES[family]
    model = tiny_model(name, **settings)
    really = really_saved_by(model, tiny_inputs(name))
    found = {linear: set(who) for linear, who in saved_by(walk_model(model)).items()}
    assert len(found) > 6
    assert {linear: found[linear] for linear in found if linear in really} == {
        linear: who for linear, who in really.items() if linear in found
    }
    assert found.keys() - really.keys() <= {"vit.embeddings.patch_embeddings.projection"}  # it keeps the model's input


def test_adapters_share_their_input_and_have_the_holders_of_real_tensors() -> None:
    config = peft.LoraConfig(target_modules="all-linear", r=2, lora_dropout=0.0)
    model = peft.get_peft_model(tiny_model("llama"), config)
    sites = walk_model(model)
    found = saved_by(sites)
    layer = "base_model.model.model.layers.0"
    attention = (f"scaled_dot_product_attention in {layer}.self_attn",)
    assert (
        found[f"{layer}.self_attn.o_proj.base_layer"] == found[f"{layer}.self_attn.o_proj.lora_A.default"] == attention
    )
    assert found[f"{layer}.mlp.down_proj.lora_A.default"] == ()
    shared = {linear.parameter: linear.input_shared_with for linear in sites.linears}
    assert f"{layer}.mlp.down_proj.lora_A.default.weight" in shared[f"{layer}.mlp.down_proj.base_layer.weight"]
    really = really_saved_by(model, tiny_inputs("llama"))
    adapters = {linear for linear in really if "lora_A" in linear}
    assert len(adapters) == 14
    assert {linear: set(found[linear]) for linear in adapters} == {linear: really[linear] for linear in adapters}


def test_a_config_says_as_much_as_a_model() -> None:
    found = saved_by(walk_config(tiny_config("opt")))
    assert found["model.decoder.layers.1.fc2"] == ("relu in model.decoder.layers.1.activation_fn",)
    assert found["model.decoder.layers.1.self_attn.out_proj"] == (
        "scaled_dot_product_attention in model.decoder.layers.1.self_attn",
    )
    assert found["model.decoder.layers.1.fc1"] == found["model.decoder.layers.1.self_attn.q_proj"] == ()


def test_dropout_in_between_makes_a_copy_of_what_relu_keeps() -> None:
    with_dropout, without = (
        saved_by(find_sites(build_meta(tiny_config("t5", feed_forward_proj="relu", dropout_rate=rate))))
        for rate in (0.1, 0.0)
    )
    dense = "encoder.block.1.layer.1.DenseReluDense"
    assert with_dropout[f"{dense}.wo"] == ()
    assert without[f"{dense}.wo"] == (f"relu in {dense}.act",)


def test_attention_with_a_trained_bias_keeps_its_output_on_a_device() -> None:
    found = saved_by(find_sites(build_meta(tiny_config("t5"))))
    attention = "decoder.block.0.layer.1.EncDecAttention"
    assert found[f"{attention}.o"] == (f"scaled_dot_product_attention in {attention}",)


# -- one thing at a time ----------------------------------------------------------------------------------------------


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)


class ReadsWhatReluKeeps(Toy):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))


class ReadsWhatANormReads(Toy):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y) + self.norm(y)


class ReadsAProduct(Toy):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y.sigmoid() * y)


class ReadsAFactor(Toy):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y) * y * self.norm(x)


class ReadsAPower(Toy):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(2.0 ** self.first(x))


class ReadsASliceOfWhatIsKept(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(WIDTH // 2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.first(x).chunk(2, -1)
        return self.second(left) + F.silu(right).sum()


class RunsTwice(Toy):
    """Only one of its inputs is kept by somebody else."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.second(F.relu(self.first(x))) + 1.0)


class KeepsWhatItForgets(Toy):
    """The relu's result is kept while it runs, but nothing that it returns needs it: its graph is gone."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).detach().requires_grad_()
        z = F.relu(y)
        return self.second(z.detach())


class CastsItsWeight(Toy):
    """A linear by a copy of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(self.first(x)), (self.second.weight * 0.5).clone())


class MultipliesByAWeight(Toy):
    """What a norm's weight scales is no copy of the weight: linears read it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm.weight * torch.tanh(self.first(x)))


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y


class ReadsWhatAFunctionKeeps(Toy):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = OwnFunction.apply(self.first(x))
        return self.second(y)


class OwnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()


class IsALinearByAFunction(Toy):
    """No linear of ours keeps this input: whoever wrote the function decides."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = OwnLinear.apply(self.first(x) * 2.0, self.second.weight)
        return y


@pytest.mark.parametrize(
    ("build", "holders"),
    [
        (ReadsWhatReluKeeps, ("relu",)),
        (ReadsWhatANormReads, ("layer_norm in norm",)),
        (ReadsAProduct, ()),
        (ReadsAFactor, ("mul",)),
        (ReadsAPower, ("pow",)),
        (ReadsASliceOfWhatIsKept, ("silu",)),
        (RunsTwice, ()),
        (KeepsWhatItForgets, ()),
        (CastsItsWeight, ("relu",)),
        (MultipliesByAWeight, ()),
        (ReadsWhatAFunctionKeeps, ("an autograd function",)),
        (IsALinearByAFunction, ("an autograd function",)),
    ],
)
def test_the_second_linears_holders(build: Callable[[], nn.Module], holders: tuple[str, ...]) -> None:
    sites = walk_model(build(), {"x": torch.randn(2, 3, WIDTH)})
    assert saved_by(sites)["second"] == holders


class Attention(Toy):
    """`arrange` brings the output of attention, (batch, heads, tokens, channels), to the linear."""

    def __init__(self, arrange: Callable[[Tensor], Tensor], heads: int | None = 2) -> None:
        super().__init__()
        self.arrange, self.heads = arrange, heads

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.heads is not None:
            y = y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return self.second(self.arrange(F.scaled_dot_product_attention(y, y, y)))


def _tokens_first(y: Tensor) -> Tensor:
    return y.transpose(1, 2).contiguous().reshape(2, 3, WIDTH)


@pytest.mark.parametrize(
    ("model", "holders"),
    [
        (Attention(_tokens_first), ("scaled_dot_product_attention",)),
        (Attention(lambda y: y.transpose(1, 2).flatten(2) * 2), ()),
        (Attention(lambda y: y.contiguous().view(2, 3, WIDTH)), ()),  # heads first: a copy
        (Attention(lambda y: y, heads=None), ()),  # three dimensions: no fused kernel takes them
    ],
)
def test_attentions_output_is_kept_as_a_fused_kernel_makes_it(model: nn.Module, holders: tuple[str, ...]) -> None:
    assert saved_by(walk_model(model, {"x": torch.randn(2, 3, WIDTH)}))["second"] == holders


def test_where_nothing_is_trained_holders_are_those_of_training_all() -> None:
    model = clone_to_meta(ReadsWhatReluKeeps().requires_grad_(False))
    assert saved_by(find_sites(model, {"x": torch.empty(2, 3, WIDTH)}))["second"] == ("relu",)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_frozen_start_keeps_nothing() -> None:
    model = ReadsWhatReluKeeps()
    model.first.requires_grad_(False)
    assert saved_by(walk_model(model, {"x": torch.randn(2, 3, WIDTH)}))["second"] == ()


def test_a_checkpointed_block_has_the_holders_that_it_has_when_it_runs_again() -> None:
    class Checkpointed(ReadsWhatReluKeeps):
        gradient_checkpointing = True

        def forward(self, x: Tensor) -> Any:
            if self.gradient_checkpointing and self.training:
                return checkpoint(super().forward, x, use_reentrant=False)
            return super().forward(x)

    model = clone_to_meta(Checkpointed())
    model.gradient_checkpointing = True
    assert saved_by(find_sites(model, {"x": torch.empty(2, 3, WIDTH)}))["second"] == ("relu",)
    assert model.gradient_checkpointing


def test_a_layer_that_is_dropped_at_random_is_seen_in_another_call() -> None:
    sites = walk_model(tiny_model("opt", layerdrop=0.5, num_hidden_layers=3))
    attention = [who for linear, who in saved_by(sites).items() if linear.endswith("out_proj")]
    assert [len(who) for who in attention] == [1, 1, 1]


def test_a_forward_that_refuses_gradients_leaves_a_note() -> None:
    class WritesIntoALeaf(ReadsWhatReluKeeps):
        def forward(self, x: Tensor) -> Tensor:
            self.first.bias.mul_(1.0)
            return super().forward(x)

    sites = walk_model(WritesIntoALeaf(), {"x": torch.randn(2, 3, WIDTH)})
    assert [linear.saved_by for linear in sites.linears] == [(), ()]
    assert [note for note in sites.notes if "saves the inputs of 2 linears is not known" in note]


def test_modules_that_are_given_a_linears_input() -> None:
    given = {site.parameter: site.given_to for site in walk_model(tiny_model("bert")).linears}
    layer = "bert.encoder.layer.1"
    assert given[f"{layer}.attention.self.query.weight"][:2] == (layer, f"{layer}.attention")
    assert given[f"{layer}.intermediate.dense.weight"][0] == f"{layer}.intermediate"
    assert given[f"{layer}.output.dense.weight"][0] == f"{layer}.output"


@pytest.mark.parametrize("name", ["llama", "bert", "bert eager"])
def test_a_walked_model_is_freed(name: str) -> None:
    """The graphs of the walk's forwards hold what observed them, where the garbage collector does not look."""
    family, settings = FAMILIES[name]
    model = tiny_model(family, **settings)
    parts = [weakref.ref(each) for each in (*model.modules(), *model.parameters())]
    find_sites(model)
    del model
    for _ in range(2):  # a graph that the first collection frees holds Python's objects until then
        gc.collect()
    assert [part() for part in parts if part() is not None] == []
