"""The toy patch on a live module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memopt.patches.swap import steps_aside, swap_forward
from tests.toy_patch.probe import computes_toy


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(1.702 * x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(1.702 * x)
        return dy * gate * (1 + 1.702 * x * (1 - gate))


def patch_toy(module: nn.Module) -> None:
    """Prove that `module` computes the formula, and make it keep its input only."""
    if not computes_toy(module, torch.linspace(-8, 8, 65, dtype=torch.float64)):
        raise ValueError("it computes something else")
    swap_forward(module, _forward, None)


def _forward(stock: Callable[..., Tensor], state: None, module: nn.Module, x: Tensor) -> Tensor:
    return stock(module, x) if steps_aside() else _Gate.apply(x)  # type: ignore[no-untyped-call]
