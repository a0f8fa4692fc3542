"""A convolution whose backward computes the weight's gradient first, and then frees its input.

    forward     y = conv(x, W) + b
    backward    dW from dy and x, db = sum of dy; x is freed; dx from dy and W

PyTorch's own backward is one operation, in which x and dx are alive together. If backward has recomputed x, nothing
else holds it, so freeing it saves memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memopt.kernels.base.autograd import autocast_as
from memopt.torch_compat import DirectFunction


class Settings(NamedTuple):
    """How a convolution runs over its input; a number for each dimension of space."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings) -> Tensor:
    """`torch.nn.functional.conv1d`, `conv2d` or `conv3d`, by the number of dimensions.

    Args:
        x: (batch, in, ...), contiguous.
        weight: (out, in / groups, ...), of the dtype of `x`.
        bias: (out,) or None.

    Returns:
        y: (batch, out, ...). It can be differentiated as often as PyTorch's.
    """
    y: Tensor = ConvolutionFunction.apply(x, weight, bias, settings)
    return y


class ConvolutionFunction(DirectFunction):
    """Saves x and the weight, as the stock operation does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings) -> Tensor:
        ctx.settings, ctx.bias_shape = settings, None if bias is None else list(bias.shape)
        ctx.save_for_backward(x, weight)
        stride, padding, dilation, groups = settings
        with autocast_as(None, x):
            return torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        dx = dweight = dbias = None
        with autocast_as(None, dy):
            if of_weight or of_bias:
                _, dweight, dbias = _backward(ctx, dy, x, weight, (False, of_weight, of_bias))
            # dx needs only the shape of x; `torch.nn.grad` relies on this too.
            shape = dy.new_empty(1).expand(x.shape)
            del x
            if of_x:
                dx = _backward(ctx, dy, shape, weight, (True, False, False))[0]
        return dx, dweight, dbias, None


def _backward(ctx: Any, dy: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, bool, bool]) -> list[Tensor | None]:
    stride, padding, dilation, groups = ctx.settings
    found: list[Tensor | None] = torch.ops.aten.convolution_backward(
        dy, x, weight, ctx.bias_shape, stride, padding, dilation, False, [0] * len(stride), groups, mask
    )
    return found
