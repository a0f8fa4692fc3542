"""Small modules to run inside a scope, and what they keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt.saved import RecomputeScope


class Observer:
    """Outermost hook that counts the storages of non-parameters that are really kept."""

    memopt_observer = True

    def __init__(self, model: nn.Module) -> None:
        self.parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.kept: dict[int, Tensor] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        detached = tensor.detach()
        if tensor.untyped_storage().data_ptr() not in self.parameters:
            self.kept[tensor.untyped_storage().data_ptr()] = detached
        return detached

    @property
    def elements(self) -> int:
        return sum(t.untyped_storage().nbytes() // t.element_size() for t in self.kept.values())


class GatedMLP(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Scoped(nn.Module):
    def __init__(self, inner: nn.Module, families: frozenset[str] | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.arguments = () if families is None else (families,)

    def forward(self, x: Tensor) -> Tensor:
        with RecomputeScope(*self.arguments):
            return self.inner(x)


def make_mlp(activation: Callable[[Tensor], Tensor] = F.silu) -> tuple[GatedMLP, Tensor]:
    torch.manual_seed(0)
    return GatedMLP(activation), torch.randn(2, 3, 8, requires_grad=True)


def gradients(model: nn.Module, loss: Tensor, x: Tensor, **backward: bool) -> list[Tensor]:
    model.zero_grad()
    x.grad = None
    loss.backward(**backward)
    return [p.grad.clone() for p in model.parameters()] + [x.grad.clone()]


class WritesIntoWhatItKept(torch.autograd.Function):
    """The sine, whose backward computes the cosine in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return dy * x.cos_()
