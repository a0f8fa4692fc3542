"""Activations whose output a convolution reads through a border of the model's own (as in MobileNet)."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import memopt
from memopt.plan.plan import Entry
from memopt.trace.account import account, live_bytes

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu6": nn.ReLU6, "silu": nn.SiLU, "relu": nn.ReLU}


class Padded(nn.Module):
    def __init__(self, activation: nn.Module, twice: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3)
        self.norm, self.activation, self.twice = nn.BatchNorm2d(8), activation, twice

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.norm(self.first(x)))
        if self.twice:
            with torch.no_grad():
                y.mul_(2)
        return self.second(F.pad(y, (0, 1, 1, 2)))


def entries(model: nn.Module) -> list[Entry]:
    plan = memopt.plan_for(model, "exact", inputs={"x": torch.randn(2, 3, 8, 8)})
    return [entry for entry in plan.entries if entry.kind == "activation"]


@pytest.mark.parametrize(("name", "twice"), [("relu", False), ("relu6", False), ("relu6", True), ("silu", True)])
def test_gradients_are_stocks(name: str, twice: bool) -> None:
    torch.manual_seed(0)
    stock, x = Padded(ACTIVATIONS[name](), twice), torch.randn(2, 3, 8, 8)
    patched = copy.deepcopy(stock)
    memopt.patch(patched, inputs={"x": x})
    expected, actual = (
        torch.autograd.grad(model(x).sin().sum(), list(model.parameters())) for model in (stock, patched)
    )
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))


def test_what_stock_refuses_is_refused() -> None:
    patched, x = Padded(nn.ReLU(), twice=True), torch.randn(2, 3, 8, 8)
    memopt.patch(patched, inputs={"x": x})
    with pytest.raises(RuntimeError, match="inplace"):
        patched(x).sum().backward()


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_the_padded_copy_is_not_kept(activation: Callable[[], nn.Module]) -> None:
    stock, x = Padded(activation()), torch.randn(2, 3, 8, 8)
    assert [entry.action for entry in entries(stock)] == ["recompute"]
    patched = copy.deepcopy(stock)
    memopt.patch(patched, inputs={"x": x})
    padded = 2 * 8 * 11 * 9 * 4  # the constant around it is a number on the CPU
    assert live_bytes(lambda: stock(x)) - live_bytes(lambda: patched(x)) == padded
    assert account(patched, lambda: patched(x)).total == live_bytes(lambda: patched(x))


def test_a_padded_function_is_left_with_its_reason() -> None:
    class Functional(Padded):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(F.pad(F.silu(self.norm(self.first(x))), (1, 1)))

    (entry,) = (
        entry for entry in entries(Functional(nn.Identity())) if "silu" in entry.reason or "copy" in entry.reason
    )
    assert entry.action == "keep"
    assert "nothing shows" in entry.reason


def test_mobilenet_keeps_a_third_less() -> None:
    torch.manual_seed(0)
    config = transformers.MobileNetV2Config(depth_multiplier=0.35, image_size=64)
    stock = transformers.MobileNetV2Model(config).train()
    patched = copy.deepcopy(stock)
    memopt.patch(patched)
    pixels = torch.randn(2, 3, 64, 64)
    stock_bytes, patched_bytes = (live_bytes(lambda m=m: m(pixels).last_hidden_state) for m in (stock, patched))
    assert patched_bytes < 0.75 * stock_bytes


def test_a_relu_of_the_model_itself_promises_nothing_without_a_copy() -> None:
    class Bare(Padded):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.activation(self.norm(self.first(x))))

    assert [entry.action for entry in entries(Bare(nn.ReLU()))] == ["keep"]
