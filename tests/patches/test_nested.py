"""Patched models on nested tensors: rows of different lengths in one tensor."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import memopt
from tests.saved.codable import Model


class Layer(nn.Module):
    """A norm, an MLP with an activation and a gated MLP."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(width), nn.SiLU()
        self.up, self.gate, self.down = nn.Linear(width, 12), nn.Linear(width, 12), nn.Linear(12, width)
        self.after = nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.down(self.act(self.gate(h)) * self.up(h))
        return self.norm(x + self.after(x))


def gradients(model: nn.Module, layout: torch.layout) -> list[Tensor]:
    rows = [torch.linspace(-1, 1, 8 * n, dtype=torch.float64).sin().view(n, 8).requires_grad_() for n in (5, 3)]
    rows_of_output = model(torch.nested.as_nested_tensor(rows, layout=layout)).unbind()
    return list(torch.autograd.grad(sum(row.pow(3).sum() for row in rows_of_output), [*rows, *model.parameters()]))


# PyTorch's checkpoint of its own cannot save nested tensors of the strided layout.
@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("exact-unfolded", torch.jagged),
        ("exact-unfolded", torch.strided),
        ("exact-levels", torch.jagged),
        ("long-context", torch.jagged),
        ("approx-8bit", torch.jagged),
        ("mesa", torch.jagged),
    ],
)
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_gradients_of_nested_rows_are_those_of_the_stock_model(recipe: str, layout: torch.layout) -> None:
    stock = Model(Layer).double()
    patched = copy.deepcopy(stock)
    memopt.patch(patched, recipe, inputs={"x": torch.randn(2, 4, 8)})
    torch.testing.assert_close(gradients(patched, layout), gradients(stock, layout))
