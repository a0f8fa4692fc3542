"""Weights that a parametrisation computes anew at each read: patched modules read them as often as stock ones."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm

import memopt
from tests.factories import tiny_inputs, tiny_model


class Count(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.number += 1
        return weight * 1.0


class Drop(nn.Module):
    """Noise on a weight, as DropConnect adds it."""

    def forward(self, weight: Tensor) -> Tensor:
        return F.dropout(weight, 0.2)


def step(model: nn.Module, name: str) -> tuple[Tensor, Tensor]:
    """The loss and the next random number."""
    torch.manual_seed(3)
    loss = model(**tiny_inputs(name, 2, 8)).loss
    loss.backward()
    return loss.detach(), torch.rand(1)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "mistral"])
def test_a_weight_is_computed_as_often_as_in_stock(name: str) -> None:
    stock = tiny_model(name)
    counts = []
    for model in (stock, memopt.patch(copy.deepcopy(stock), "exact-unfolded")):
        step(model, name)
        counted = {}
        for at, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and "lm_head" not in at:
                counted[at] = Count()
                parametrize.register_parametrization(module, "weight", counted[at])
        for each in counted.values():
            each.number = 0
        step(model, name)
        counts.append({at: each.number for at, each in counted.items()})
    assert counts[0] == counts[1]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["noise", "spectral norm"])
def test_a_parametrised_down_projection_trains_as_in_stock(kind: str, when: str) -> None:
    stock = tiny_model("llama").train()
    patched = tiny_model("llama").train() if when == "before" else memopt.patch(copy.deepcopy(stock), "exact-unfolded")
    for model in (stock, patched):
        torch.manual_seed(0)  # of the spectral norm's vectors
        for module in [each for at, each in model.named_modules() if at.endswith("down_proj")]:
            if kind == "noise":
                parametrize.register_parametrization(module, "weight", Drop())
            else:
                spectral_norm(module)
    if when == "before":
        memopt.patch(patched, "exact-unfolded")
    for _ in range(2):
        for one, other in zip(step(stock, "llama"), step(patched, "llama"), strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
    for one, other in zip(stock.buffers(), patched.buffers(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
    for a, b in zip(stock.parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6)
