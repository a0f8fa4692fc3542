"""Blocks whose keys and values another part of the forward reads from a cache are not checkpointed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

import memopt
from memopt.walk.models.config import model_class
from memopt.walk.observe import walk_model
from tests.factories import tiny_model
from tests.zoo.build import Row, config_of, twin_of

IDS = torch.arange(24).view(2, 12) % 50


def llama() -> LlamaModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaModel(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


class Expert(nn.Module):
    """The second model reads the states of the first, as PI0's action expert those of its language model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = llama(), llama()

    def forward(self, ids: Tensor) -> Tensor:
        cache = self.first(ids[:, :8], use_cache=True).past_key_values
        return self.second(ids[:, 8:], past_key_values=cache).last_hidden_state


class Chunks(nn.Module):
    """One model reads a text in two chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = llama()

    def forward(self, ids: Tensor) -> Tensor:
        cache = self.first(ids[:, :8], use_cache=True).past_key_values
        return self.first(ids[:, 8:], past_key_values=cache).last_hidden_state


def gradients(model: nn.Module) -> list[Tensor]:
    model.train()(IDS).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("recipe", ["exact-levels", "long-context"])
@pytest.mark.parametrize("make", [Expert, Chunks])
def test_gradients_are_the_stock_models(make, recipe):
    stock, ours = make(), make()
    memopt.patch(ours, memopt.load_recipe(recipe, ["checkpointing.method=full"]), inputs={"ids": IDS})
    for mine, its in zip(gradients(ours), gradients(stock), strict=True):
        assert (mine - its).norm() <= 1e-5 * its.norm()  # Llama's norms compute in fp32


@pytest.mark.parametrize("make", [Expert, Chunks])
def test_the_blocks_that_write_are_named_and_left_with_the_reason(make):
    model = make()
    written = tuple(f"first.layers.{place}" for place in range(2))
    assert tuple(block for block, _ in walk_model(model, {"ids": IDS}).run_once) == written
    memopt.patch(model, memopt.load_recipe("exact-levels", ["checkpointing.method=full"]), inputs={"ids": IDS})
    entries = {each.site: each for each in memopt.summary(model).plan.entries if each.kind == "checkpointing"}
    assert {name for name, each in entries.items() if "from a cache" in each.reason} == {*written}


@pytest.mark.parametrize("name", ["llama", "t5", "gpt2", "whisper"])
def test_a_cache_that_is_written_and_not_read_keeps_no_block(name):
    assert walk_model(tiny_model(name)).run_once == ()


def test_a_cache_that_a_model_returns_is_filled_if_transformers_checkpoints_none_of_its_layers():
    """DiffusionGemma's encoder: its decoder, elsewhere, reads the cache."""
    config = twin_of(config_of(Row("diffusion_gemma_text"))).config
    model = model_class(config)(config).train()
    stock = model(IDS).past_key_values
    memopt.patch(model, memopt.load_recipe("long-context", ["checkpointing.method=full"]))
    ours = model(IDS).past_key_values
    assert len(ours.layers) == len(stock.layers) > 0
    for mine, its in zip(ours.layers, stock.layers, strict=True):
        torch.testing.assert_close((mine.keys, mine.values), (its.keys, its.values))
