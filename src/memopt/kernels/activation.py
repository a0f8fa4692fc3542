"""An elementwise activation that keeps its input only.

    forward   h = f(z)          backward   dz = f'(z) * dh

An activation composed of several operations makes autograd keep an intermediate for each (gelu_new keeps five
tensors). This operator keeps z alone, computes h with the very same function, and in backward differentiates that
function again at z, so value and gradient are those of the stock module to the last bit. h can be made again from z,
so the next linear keeps a handle inside a `memopt.saved.RecomputeScope`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memopt.kernels.autograd import refuse_double_backward
from memopt.saved.rules import Node, recomputable

Elementwise = Callable[[Tensor], Tensor]


def recomputed_activation(z: Tensor, function: Elementwise) -> Tensor:
    """function(z), keeping z only.

    Args:
        z: any shape, floating point.
        function: elementwise, without parameters and without randomness.

    Returns:
        The value of function(z), with its shape and dtype.
    """
    h: Tensor = ActivationFunction.apply(z, function)  # type: ignore[no-untyped-call]
    return h


class ActivationFunction(torch.autograd.Function):
    """Keeps z; differentiates `function` again in backward."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, function: Elementwise) -> Tensor:
        ctx.function, ctx.remakes_output = function, True
        device = z.device.type
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        ctx.save_for_backward(z)
        return function(z)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, None]:
        refuse_double_backward()
        (z,) = ctx.saved_tensors
        # Backward runs outside the forward's autocast region, which decides in what dtype each step is computed.
        with torch.enable_grad(), torch.autocast(*ctx.autocast):
            z = z.detach().requires_grad_()
            h = ctx.function(z)
        (dz,) = torch.autograd.grad(h, z, dh)
        return dz, None


@recomputable("ActivationFunctionBackward", "activation", lambda node: getattr(node, "remakes_output", False))
def _output(node: Node) -> Tensor:
    (z,) = node.saved_tensors
    with torch.autocast(*node.autocast):
        h: Tensor = node.function(z)
    return h
