"""The peak of a step: what lives when, without the gradients of parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt.reporting.timeline import step

ROWS, WIDTH = 64, 8
VECTOR = ROWS * WIDTH * 4
"""Bytes of one activation."""


class Chain(nn.Module):
    """`length` sines, each of which saves its input."""

    def __init__(self, length: int, *, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = self.first if tied else nn.Linear(WIDTH, WIDTH, bias=False)
        self.length = length

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        for _ in range(self.length):
            hidden = hidden.sin()
        return SimpleNamespace(loss=self.last(hidden).sum())


@pytest.mark.parametrize("length", [1, 5])
def test_what_forward_keeps_is_counted_once(length: int) -> None:
    model, x = Chain(length), torch.randn(ROWS, WIDTH)
    found = step(model, lambda: model(x))
    assert found.kept == (length + 1) * VECTOR + 4  # the inputs of the sines and of the last linear, and the loss


def test_the_peak_names_the_storages_that_live_then() -> None:
    model, x = Chain(3), torch.randn(ROWS, WIDTH)
    found = step(model, lambda: model(x))
    assert sum(each.nbytes for each in found.at_peak) == found.peak
    assert found.peak > found.kept
    assert {each.phase for each in found.at_peak} == {"forward", "backward"}


def test_a_tensor_that_outlives_its_use_raises_the_peak() -> None:
    model, x = Chain(3), torch.randn(ROWS, WIDTH)
    lean = step(model, lambda: model(x)).peak
    model.zero_grad()

    def wasteful() -> Any:
        output = model(x)
        output.kept = torch.zeros(7 * ROWS, WIDTH)
        return output

    assert step(model, wasteful).peak == lean + 7 * VECTOR


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_parameters_are_left_out(tied: bool) -> None:
    """As wide as they are here, they would be the peak; a tied one is summed up over two uses."""
    wide = 512
    model = Chain(1, tied=tied)
    model.first.weight = nn.Parameter(torch.randn(wide, wide))
    if not tied:
        model.last.weight = nn.Parameter(torch.randn(wide, wide))
    x = torch.randn(2, wide)
    found = step(model, lambda: model(x))
    one_gradient = wide * wide * 4
    # Of a tied weight the second gradient lives beside the sum that it is added to.
    assert (found.peak > one_gradient) == tied
    assert found.peak < 1.1 * one_gradient
    assert model.first.weight.grad is not None
