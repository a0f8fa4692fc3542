"""Linears behind an activation, which make its output again and differentiate it in one pass where that is faster.

A module qualifies by what it computes of its weight and bias, not by its class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memopt.kernels.linear.function import linear, takes_offer
from memopt.patches.swap import is_swapped, is_watched, steps_aside, swap_forward
from memopt.walk.probes.isolate import with_stand_ins

_WIDTH = 5


@dataclass(frozen=True)
class LinearRewrite:
    """What a patched linear knows."""

    transposed: bool
    """Its weight is (in, out) instead of (out, in)."""
    has_bias: bool


def patch_linear(module: nn.Module) -> None:
    """Let `module`, where its input can be recomputed, keep what it is computed from.

    Raises:
        ValueError: the module cannot be swapped, or is not a linear of its own weight and bias.
    """
    if not (is_linear(module) or is_linear(module, transposed=True)):
        raise ValueError("it is not a linear of its own weight and bias")
    has_bias = module._parameters.get("bias") is not None
    swap_forward(module, _forward, LinearRewrite(not is_linear(module), has_bias))


def trains_as_linear(module: nn.Module) -> bool:
    """Whether :func:`patch_linear` takes `module` and has something to do: a frozen weight asks for no input."""
    weight = module._parameters.get("weight")
    if weight is None or not weight.requires_grad or is_swapped(module):
        return False
    return is_linear(module) or is_linear(module, transposed=True)


def is_linear(module: nn.Module, *, transposed: bool = False) -> bool:
    """Whether `module` holds a weight and perhaps a bias, and its forward is x W^T + b (transposed: x W + b)."""
    parameters = dict(module.named_parameters(recurse=False))
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight is None or weight.dim() != 2 or not weight.is_floating_point():
        return False
    has_more = len(parameters) > 1 + (bias is not None) or next(module.buffers(), None) is not None
    if has_more or next(module.children(), None) is not None:
        return False
    size = weight.size(1 if transposed else 0)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64), requires_grad=False)

    stand_ins = {"weight": draw(_WIDTH, size) if transposed else draw(size, _WIDTH)}
    if bias is not None:
        stand_ins["bias"] = draw(size)
    x = torch.randn(2, 3, _WIDTH, generator=generator, dtype=torch.float64)
    try:
        with torch.no_grad():
            y = with_stand_ins(module, parameters=stand_ins).forward(x)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False
    matrix = stand_ins["weight"].t() if transposed else stand_ins["weight"]
    expected = nn.functional.linear(x, matrix, stand_ins.get("bias"))
    return isinstance(y, Tensor) and y.shape == expected.shape and torch.allclose(y, expected, rtol=1e-12, atol=1e-12)


def _forward(
    stock: Callable[..., Tensor], rewrite: LinearRewrite, module: nn.Module, *args: Any, **kwargs: Any
) -> Tensor:
    given, parameters = (*args, *kwargs.values()), module._parameters
    weight, bias = parameters.get("weight"), parameters.get("bias")
    # A tool that computes weight or bias from something else takes them out of the parameters.
    as_patched = weight is not None and (bias is not None) == rewrite.has_bias and not is_watched(module)
    if steps_aside() or len(given) != 1 or not as_patched:
        return stock(module, *args, **kwargs)
    assert weight is not None
    if not takes_offer(given[0], weight):
        return stock(module, *args, **kwargs)
    return linear(given[0], weight.t() if rewrite.transposed else weight, bias)
