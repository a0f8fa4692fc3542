"""The account of a real forward: the right bytes, once each, under the right name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt.patches.apply import apply
from memopt.plan.plan import make_plan
from memopt.plan.recipe import load_recipe
from memopt.saved import RecomputeScope
from memopt.saved.observer import SavedTensorObserver
from memopt.trace.account import account, live_bytes
from memopt.walk.observe import walk_model
from tests.factories import tiny_inputs, tiny_model
from tests.trace.builders import (
    BATCH,
    HIDDEN,
    SEQ,
    named_config,
    sites_of,
    table_model,
    table_run,
    units_of_one_block,
    with_lora,
)


class Chain(nn.Module):
    """Blocks that square their input."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Square() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.exp()


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


class HidesInContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.hidden = x.clone()
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.hidden


def leaf(*shape: int) -> Tensor:
    return torch.ones(*shape, requires_grad=True)


@pytest.mark.parametrize(("name", "units"), [("llama", 22.77), ("bert", 16.04), ("vit", 16.04)])
def test_a_stock_block_keeps_what_the_published_table_says(name: str, units: float) -> None:
    assert units_of_one_block(name) == pytest.approx(units, abs=0.02)


@pytest.mark.parametrize(("name", "units"), [("llama", 20.88), ("vit", 16.13)])
def test_a_block_with_lora_on_every_linear_keeps_what_the_published_table_says(name: str, units: float) -> None:
    assert units_of_one_block(name, with_lora) == pytest.approx(units, abs=0.02)


def test_a_patched_block_keeps_what_the_published_table_says() -> None:
    def patched(model: Any) -> nn.Module:
        apply(model, make_plan(walk_model(model), load_recipe("exact-unfolded")))
        return model

    # Each of the two norms also keeps a copy of its weight, which is as much as one token's hidden state.
    copies = 2 / (BATCH * SEQ)
    assert units_of_one_block("llama", patched) == pytest.approx(11.40 + copies, abs=0.02)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit", "t5"])
def test_nothing_hides_outside_of_saved_tensors_in_a_stock_model(name: str) -> None:
    model, inputs = tiny_model(name), tiny_inputs(name)

    def run() -> Any:
        return model(**inputs)

    counted = account(model, run)
    assert counted.total == live_bytes(run)
    assert counted.unseen == 0


def test_a_tensor_in_a_context_attribute_is_counted_as_unseen() -> None:
    x = leaf(10, 10)

    def run() -> Tensor:
        return HidesInContext.apply(x.exp())

    counted = account(nn.Identity(), run)
    assert counted.unseen == x.nbytes
    assert counted.total == live_bytes(run) == 2 * x.nbytes


def test_views_of_one_storage_are_counted_once_and_in_full() -> None:
    x = leaf(4, 6)

    def run() -> Tensor:
        y = x.exp()
        return (y[:1].sin() + y[:, :4].cos().sum()).sum()

    counted = account(nn.Identity(), run)
    assert [kept.nbytes for kept in counted.storages] == [x.nbytes]
    assert [operation for _, operation in counted.storages[0].savers] == ["exp", "sin", "cos"]


def test_parameters_buffers_and_inputs_are_not_counted() -> None:
    linear = nn.Linear(8, 8)
    linear.register_buffer("scale", torch.full((8,), 2.0))
    x = torch.ones(3, 8)
    assert account(linear, lambda: linear(x) * linear.scale).total == 0


def test_what_the_result_does_not_need_is_not_counted() -> None:
    x = leaf(8)

    def run() -> Tensor:
        x.exp().sin()
        return x.exp()

    assert account(nn.Identity(), run).total == x.nbytes


def test_a_storage_belongs_to_the_block_of_its_first_holder() -> None:
    model, x = Chain(3), leaf(8)
    counted = account(model, lambda: model(x.exp()), blocks=["blocks.0", "blocks.1", "blocks.2"])
    assert counted.per_block() == {"blocks.0": 0, "blocks.1": 32, "blocks.2": 32}
    assert counted.per_part() == {"embeddings": 32, "block": 64, "head": 32}


def test_rotary_embeddings_are_shared_by_the_blocks() -> None:
    model, inputs = tiny_model("llama"), tiny_inputs("llama", batch=2, seq=8)
    counted = account(model, lambda: model(**inputs), blocks=["model.layers.0", "model.layers.1"])
    cos_and_sin = 2 * 8 * 16 * 4
    assert counted.per_part()["shared"] == cos_and_sin
    assert len(set(counted.per_block().values())) == 1


def test_causes_are_words_of_the_field() -> None:
    model, inputs = tiny_model("llama"), tiny_inputs("llama")
    sites = sites_of(named_config("llama"))
    counted = account(model, lambda: model(**inputs), blocks=sites.blocks, sites=sites)
    assert set(counted.per_cause("model.layers.1")) == {
        "norm input",
        "norm output (x_hat)",
        "norm statistics",
        "attention q/k/v",
        "attention output",
        "linear input",
        "gate",
        "up",
        "activation output",
    }
    gates = [kept for kept in counted.of_block("model.layers.1") if kept.cause == "gate"]
    assert [kept.savers for kept in gates] == [(("model.layers.1.mlp.act_fn", "silu"),)]


def test_the_unit_is_the_hidden_state_that_enters_the_first_block() -> None:
    model = table_model("bert", 1)
    counted = account(model, table_run("bert", model), blocks=["bert.encoder.layer.0"])
    assert counted.unit == BATCH * SEQ * HIDDEN * 2
    assert counted.units(counted.per_block()["bert.encoder.layer.0"]) == pytest.approx(16.04, abs=0.01)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_block_keeps_its_input_only(use_reentrant: bool) -> None:
    model = table_model("bert", 2)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    blocks = ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    counted = account(model, table_run("bert", model), blocks=blocks)
    assert counted.per_cause("bert.encoder.layer.1") == {"checkpoint input": counted.unit}


def test_gradients_are_the_same_with_and_without_the_observer() -> None:
    model, inputs = tiny_model("llama"), tiny_inputs("llama")
    model(**inputs).loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()

    def run() -> Tensor:
        loss = model(**inputs).loss
        loss.backward(retain_graph=True)
        return loss

    account(model, run)
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(model.parameters(), expected, strict=True))


def test_the_observer_keeps_no_node_alive() -> None:
    y = leaf(4).exp()
    slot = SavedTensorObserver(nn.Identity()).pack(y)
    assert slot.tensor.grad_fn is None
    assert slot.tensor.untyped_storage()._cdata == y.untyped_storage()._cdata


def test_memopts_own_hooks_recognise_the_observer() -> None:
    assert SavedTensorObserver(nn.Identity()).pack.memopt_observer is True


def test_an_account_sees_the_model_as_it_runs_without_it() -> None:
    """Its hooks on modules do not count as somebody who watches: gate and up stay with the fused linear."""
    model = tiny_model("llama").train()
    sites = walk_model(model)
    apply(model, make_plan(sites, load_recipe("exact-unfolded")))
    inputs = tiny_inputs("llama")
    counted = account(model, lambda: model(**inputs), blocks=sites.blocks, sites=sites)
    of_block = [each for each in counted.of_block("model.layers.0") if each.cause in ("gate", "up")]
    assert {each.cause for each in of_block} == {"gate", "up"}
    assert {saver for each in of_block for saver in each.savers} == {("model.layers.0.mlp", "FusedLinearFunction")}


def test_codes_count_where_their_tensor_was_saved_and_computed() -> None:
    """Not where they were made: a tensor is quantised while a later module runs."""
    model = tiny_model("llama", torch.bfloat16).train()
    sites = walk_model(model)
    apply(model, make_plan(sites, load_recipe("int8")))
    inputs = tiny_inputs("llama")
    counted = account(model, lambda: model(**inputs), blocks=sites.blocks, sites=sites)
    block = "model.layers.0"
    codes = [each for each in counted.of_block(block) if each.cause == "codes"]
    norm, attention, mlp = (f"{block}.{name}" for name in ("post_attention_layernorm", "self_attn", "mlp"))
    of_norm = [each.dtype for each in codes if norm in each.savers_modules]
    assert sorted(of_norm) == ["float32", "uint8"]  # minimum and step of each group, and codes, of x_hat alone
    assert {each.savers for each in codes} == {
        ((f"{block}.input_layernorm", "NormFunction"),),
        ((attention, "scaled_dot_product_attention"),),
        ((attention, "scaled_dot_product_attention"), (f"{attention}.o_proj", "linear")),
        ((norm, "NormFunction"),),
        ((mlp, "FusedLinearFunction"),),
    }
    assert {each.module for each in codes} == {
        f"{block}.input_layernorm",
        attention,
        norm,
        f"{mlp}.gate_proj",
        f"{mlp}.up_proj",
    }


def test_a_copied_view_counts_where_its_tensor_was_computed() -> None:
    """Not where it was copied: while a later module runs, since the storage behind it was in use until then."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keys_and_values, self.later = nn.Linear(8, 16), Square()

        def forward(self, x: Tensor) -> Tensor:
            y = self.keys_and_values(x)[:, 8:].sin()
            return self.later(y * 2)

    def run() -> Tensor:
        with RecomputeScope():
            result: Tensor = model(x)
        return result

    model, x = Fused(), leaf(4, 8)
    (copied,) = (each for each in account(model, run).storages if ("", "sin") in each.savers)
    assert (copied.module, copied.shape, copied.cause) == ("keys_and_values", (4, 8), "other")
