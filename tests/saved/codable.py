"""A block whose activation is saved as a code, or not; and how its gradients compare with stock's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import memopt
from memopt.kernels.derivative_codes.schemes import FLAG_GROUP

WIDTH, HIDDEN, BATCH, TOKENS = 16, 64, 2, 16
ELEMENTS = BATCH * TOKENS * HIDDEN
BITS = {"lowmemory-bp": 2, "approx-2bit": 2, "approx-4bit": 4, "approx-8bit": 8}


class Block(nn.Module):
    """Subclasses use the activation's output otherwise."""

    activation: type[nn.Module] = nn.GELU

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, HIDDEN), self.activation(), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(self.act(self.up(x)))


class Model(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)


def freeze(model: nn.Module, frozen: bool = True) -> nn.Module:
    """The linears behind the activations."""
    for name, parameter in model.named_parameters():
        if ".down." in name or name.startswith("down."):
            parameter.requires_grad_(not frozen)
    return model


def pair(model: nn.Module, recipe: Any = "approx-2bit", x: Tensor | None = None) -> tuple[nn.Module, nn.Module]:
    patched = copy.deepcopy(model)
    return model, memopt.patch(patched, recipe, inputs={"x": inputs() if x is None else x})


def built(block: type[nn.Module] = Block, *, frozen: bool = False) -> nn.Module:
    model = Model(block)
    return freeze(model) if frozen else model


def gradients(model: nn.Module, x: Tensor, forward: Callable[[nn.Module, Tensor], Tensor] | None = None) -> Tensor:
    """All of them in one row, that of x too; by backward(), which reentrant checkpointing needs."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x) if forward is None else forward(model, x)
    y.square().sum().backward()
    return torch.cat([p.grad.flatten() for p in (x, *model.parameters()) if p.grad is not None])


def is_exact(one: nn.Module, other: nn.Module, x: Tensor | None = None, **how: Any) -> bool:
    x = inputs() if x is None else x
    a, b = gradients(one, x, **how), gradients(other, x, **how)
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def is_approximate(stock: nn.Module, patched: nn.Module, x: Tensor | None = None, **how: Any) -> bool:
    x = inputs() if x is None else x
    a, b = gradients(stock, x, **how), gradients(patched, x, **how)
    return 1e-4 < float((a - b).norm() / a.norm()) < 0.5


def bytes_of(bits: int) -> int:
    return ELEMENTS * bits // 8 + -(-ELEMENTS // FLAG_GROUP)
