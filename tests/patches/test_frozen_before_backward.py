"""Weights that are frozen, or trained anew, between forward and backward: blocks run again as in the forward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import memopt
from tests.factories import tiny_inputs, tiny_model

BLOCKS = ("checkpointing.method=full",)
KEPT = (*BLOCKS, "checkpointing.keep=attention", "tiles.method=tokens")


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of a step that trains up_proj and freezes q_proj only after its forward."""
    model.get_submodule("model.layers.0.mlp.up_proj").requires_grad_(False)
    loss = model(**tiny_inputs("llama", 2, 8)).loss
    model.requires_grad_(True)
    model.get_submodule("model.layers.1.self_attn.q_proj").requires_grad_(False)
    needs = [each.requires_grad for each in model.parameters()]
    loss.backward()
    assert [each.requires_grad for each in model.parameters()] == needs
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("settings", [BLOCKS, KEPT], ids=["blocks", "attention and tiles"])
def test_gradients_are_stocks(settings: tuple[str, ...]) -> None:
    stock = tiny_model("llama")
    patched = memopt.patch(copy.deepcopy(stock), memopt.load_recipe("exact-unfolded", settings))
    torch.testing.assert_close(gradients(patched), gradients(stock), rtol=1e-4, atol=1e-6)


def test_a_weight_that_two_modules_share_is_trained_as_in_the_forward() -> None:
    stock = tiny_model("llama")
    for layer in stock.model.layers:
        layer.mlp.up_proj.weight = layer.mlp.gate_proj.weight
        layer.self_attn.v_proj.weight = layer.self_attn.k_proj.weight
    patched = memopt.patch(copy.deepcopy(stock), memopt.load_recipe("exact-unfolded", BLOCKS))
    torch.testing.assert_close(gradients(patched), gradients(stock), rtol=1e-4, atol=1e-6)
