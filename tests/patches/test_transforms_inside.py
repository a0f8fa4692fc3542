"""Patched models whose own code takes gradients by `torch.func` in the forward, as memories that learn as they run."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt


class Learner(nn.Module):
    """Adds what a matrix returns after one step of descent for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8)
        self.memory = nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.act(self.up(self.norm(x))))

        def error(memory: Tensor, keys: Tensor) -> Tensor:
            return (F.gelu(keys @ memory) - keys).square().mean()

        learned = self.memory - torch.vmap(torch.func.grad(error), in_dims=(None, 0))(self.memory, x)
        return x + F.gelu(x @ learned)


class Learners(nn.Module):
    def __init__(self, *, by_forward: bool) -> None:
        super().__init__()
        self.by_forward = by_forward
        self.blocks = nn.ModuleList(Learner() for _ in range(3))
        self.after = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 24), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x) if self.by_forward else block(x)
        return self.head(torch.cat([each(x) for each in self.after], dim=-1))


@pytest.mark.parametrize("by_forward", [False, True])
@pytest.mark.parametrize("recipe", ["exact-unfolded", "exact-levels", "long-context"])
def test_gradients_by_transforms_inside_of_blocks_are_those_of_the_stock_model(recipe: str, by_forward: bool) -> None:
    stock = Learners(by_forward=by_forward).double()
    patched = memopt.patch(copy.deepcopy(stock), recipe, inputs={"x": torch.randn(2, 5, 8)})
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    for model in (stock, patched):
        model(x).square().sum().backward()
    for expected, found in zip(stock.parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
