"""Which modules are linears, and which of them take over the making of their input."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import memopt
from memopt.patches.linear.module import LinearRewrite, patch_linear
from memopt.patches.swap import is_swapped, swap_state
from memopt.walk.probes.linear import is_linear
from tests.factories import tiny_model


class Scaled(nn.Linear):
    def forward(self, x):
        return 1.5 * super().forward(x)


class Scored(nn.Linear):
    """A linear with something to train beside its weight."""

    def __init__(self):
        super().__init__(6, 4)
        self.scores = nn.Parameter(torch.ones(4))


def test_a_linear_is_recognised_by_its_values():
    assert is_linear(nn.Linear(6, 4))
    assert is_linear(nn.Linear(6, 4, bias=False))
    assert is_linear(nn.Linear(6, 4, device="meta"))
    assert is_linear(nn.Linear(5, 5))
    assert not is_linear(nn.Linear(5, 5), transposed=True)


def test_a_transposed_weight_is_recognised():
    assert is_linear(Conv1D(4, 6), transposed=True)
    assert not is_linear(Conv1D(4, 6))


@pytest.mark.parametrize("module", [Scaled(6, 4), Scored(), nn.Embedding(6, 4), nn.LayerNorm(6), nn.Conv1d(6, 4, 1)])
def test_anything_else_is_none(module):
    assert not is_linear(module)
    assert not is_linear(module, transposed=True)
    with pytest.raises(ValueError, match="linear"):
        patch_linear(module)


def linears(model) -> list[str]:
    """Those that take the place of an activation's backward."""
    swapped = [(name, module) for name, module in model.named_modules() if is_swapped(module)]
    return [
        name for name, module in swapped if isinstance(swap_state(module), LinearRewrite) and swap_state(module).fuses
    ]


@pytest.mark.parametrize(
    ("name", "linear"), [("vit", "fc2"), ("bert", "output.dense"), ("gpt2", "mlp.c_proj"), ("llama", None)]
)
def test_the_linear_behind_every_activation_is_patched_with_it(name, linear):
    model = memopt.patch(tiny_model(name))
    found = [found for found in linears(model) if linear is not None and found.endswith(linear)]
    assert len(found) == (model.config.num_hidden_layers if linear else 0)
    assert len(linears(model)) == len(found)


def test_frozen_linears_stay_as_they_are():
    model = tiny_model("vit")
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    assert not linears(memopt.patch(model))


def test_unpatching_gives_the_stock_forward_back():
    model = memopt.patch(tiny_model("gpt2"))
    assert linears(model)
    memopt.unpatch(model)
    assert not linears(model)
