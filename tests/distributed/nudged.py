"""A stock model that rounds another way: what rounding alone does to a run, under any engine."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


def nudge(model: nn.Module) -> None:
    """Move outputs and gradients of every module without children by one ulp, up or down, for good.

    The hooks are the modules' own, so that they hold whatever wraps the model later.
    """
    generator = torch.Generator().manual_seed(7)
    for module in model.modules():
        if not any(module.children()):
            module.register_forward_hook(lambda _module, _inputs, output: _nudged(output, generator))


def _nudged(output: Any, generator: torch.Generator) -> Any:
    if isinstance(output, Tensor) and output.is_floating_point():
        return _Nudge.apply(output, generator)
    return output


class _Nudge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, generator: torch.Generator) -> Tensor:
        ctx.generator = generator
        return _moved(x, generator)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _moved(gradient, ctx.generator), None


def _moved(x: Tensor, generator: torch.Generator) -> Tensor:
    up = torch.rand(x.shape, generator=generator) < 0.5
    moved = torch.nextafter(x, torch.where(up, math.inf, -math.inf).to(x.dtype))
    return torch.where(x.isfinite() & (x != 0), moved, x)
