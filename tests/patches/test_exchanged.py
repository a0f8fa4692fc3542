"""Weights and scales that are exchanged between forward and backward: a module that runs again takes the first ones."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.helpers import rescale_adapter_scale
from torch import Tensor, nn

import memopt
from tests.factories import tiny_inputs, tiny_model
from tests.support.compare import gradients_of

OUTPUTS = memopt.load_recipe("exact-unfolded", ("linears.recompute=auto",))
BLOCKS = memopt.load_recipe("exact-unfolded", ("checkpointing.method=full",))


def linears(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith(("up_proj", "gate_proj", "v_proj"))]


def computed(model: nn.Module) -> nn.Module:
    """Weights become results of another parameter, as a hypernetwork computes them."""
    for module in linears(model):
        weight = module._parameters.pop("weight")
        module.raw = nn.Parameter(weight.detach().clone())
    return model


def compute(model: nn.Module, factor: float) -> None:
    for module in linears(model):
        module.weight = module.raw * factor


def exchanged(model: nn.Module, then: Callable[[nn.Module], None]) -> dict[str, Tensor]:
    compute(model, 1.0)
    loss = model(**tiny_inputs("llama", 2, 8)).loss
    then(model)
    return gradients_of(model, loss)


def deleted(model: nn.Module) -> None:
    for module in linears(model):
        del module.weight


@pytest.mark.parametrize("then", [lambda model: compute(model, 3.0), deleted], ids=["exchanged", "deleted"])
def test_a_computed_weight_that_is_exchanged_before_backward_is_the_first_one_in_backward(
    then: Callable[[nn.Module], None],
) -> None:
    stock = tiny_model("llama").train()
    patched = computed(memopt.patch(copy.deepcopy(stock), OUTPUTS))
    expected = exchanged(computed(stock), then)
    torch.testing.assert_close(exchanged(patched, then), expected, rtol=1e-4, atol=1e-6)


def test_a_parameter_that_becomes_a_computed_weight_before_backward_is_the_first_one_in_backward() -> None:
    found = []
    stock = tiny_model("llama").train()
    for model in (stock, memopt.patch(copy.deepcopy(stock), OUTPUTS)):
        loss = model(**tiny_inputs("llama", 2, 8)).loss
        owned = [module.weight for module in linears(model)]
        for module, weight in zip(linears(model), owned, strict=True):
            module.__dict__["weight"] = weight.detach() * 3
        loss.backward()
        found.append([weight.grad for weight in owned])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_a_computed_weight_that_is_changed_in_place_before_backward_is_an_error_in_backward() -> None:
    patched = computed(memopt.patch(tiny_model("llama").train(), OUTPUTS))

    def change(model: nn.Module) -> None:
        with torch.no_grad():
            for module in linears(model):
                module.weight.mul_(3)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        exchanged(patched, change)


@pytest.mark.parametrize("recipe", [OUTPUTS, BLOCKS], ids=["outputs", "blocks"])
@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "hooked"])
def test_adapters_whose_scale_held_for_the_forward_alone_train_as_in_stock(
    recipe: memopt.Recipe, *, hooked: bool
) -> None:
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["up_proj", "gate_proj", "v_proj"], init_lora_weights=False)
    stock = get_peft_model(tiny_model("llama").train(), config)
    found = []
    for model in (stock, memopt.patch(copy.deepcopy(stock), recipe)):
        if hooked:
            for module in linears(model):
                module.register_forward_hook(lambda *given: None)
        with rescale_adapter_scale(model, 0.3):
            loss = model(**tiny_inputs("llama", 2, 8)).loss
        found.append(gradients_of(model, loss))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
