"""Dropout that saves its seed instead of its mask, and whose output can be recomputed.

    forward   y_i = x_i * m_i          backward   dx_i = dy_i * m_i
    m_i = 1 / (1 - p)  where uniform(i, seed) >= p,  else 0

i is the element's index in logical order and `uniform` is `memopt.kernels.base.counter.uniform`, so the mask is a
function of the seed and is not saved. If x can be recomputed, so can y: if x is the output of an activation, a norm or
a softmax, readers of y save a handle inside a `memopt.saved.RecomputeScope` (`memopt.recompute.graph`).

Products have the rounding of PyTorch's dropout with the same mask: on a CPU 1 / (1 - p) is first rounded to the dtype
of x, elsewhere to fp32.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memopt.kernels.base.autograd import accumulation_dtype
from memopt.kernels.base.counter import uniform
from memopt.kernels.base.device import runs_triton, skips_pieces
from memopt.recompute.rules import MASKED
from memopt.torch_compat import no_dispatch

#: Elements for which the reference draws random numbers at a time: they fit into a CPU's cache.
_CHUNK = 2**18


class Mask(NamedTuple):
    """The factors m_i of a tensor's elements. Equal masks give equal results on any device."""

    seed: int
    p: float
    scale: float
    """1 / (1 - p) as the forward rounded it; 0 for p = 1."""

    @property
    def threshold(self) -> float:
        """Elements with a random number below it are dropped: p rounded up to a multiple of 2**-24, exact in fp32."""
        return math.ceil(self.p * 2**24) * 2.0**-24

    def on(self, x: Tensor) -> Tensor:
        """x times the mask, rounded once: the shape and dtype of x, without a graph."""
        if runs_triton(x):
            from memopt.kernels.dropout.function_triton import launch_dropout

            return launch_dropout(x, self.seed, self.threshold, self.scale)
        with torch.no_grad():
            return _dropped_out(x, self)


def seeded_dropout(x: Tensor, p: float, seed: int) -> Tensor:
    """Dropout of the elements of `x` that saves no tensor for backward.

    An element is kept with probability 1 - p (to 2**-24). As in PyTorch, a NaN or an infinity that is dropped is NaN.

    Args:
        x: any shape and strides, floating point.
        p: probability of dropping an element, in [0, 1].
        seed: any integer, modulo 2**64; the same one gives the same mask for the same shape.

    Returns:
        y, with the shape, dtype and (if x is dense) strides of x. It can be differentiated twice.

    Raises:
        ValueError: p is outside of [0, 1], or x is not floating point.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"the probability must be between 0 and 1, not {p!r}")
    if not x.is_floating_point():
        raise ValueError(f"dropout is for floating-point tensors, not {x.dtype}")
    mask = Mask(seed, float(p), _scale(float(p), x.dtype, x.device.type))
    y: Tensor = SeededDropoutFunction.apply(x, mask)  # type: ignore[no-untyped-call]
    return y


class SeededDropoutFunction(torch.autograd.Function):
    """Saves the seed and constants of its mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Mask) -> Tensor:
        ctx.mask = mask
        # The output is recomputed from a recomputed x, so x must not have been changed in place before.
        ctx.read_unchanged = x.requires_grad and x._version == 0
        return mask.on(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        # Linear in dy with the same mask, so this function is its own backward.
        return SeededDropoutFunction.apply(dy, ctx.mask), None  # type: ignore[no-untyped-call]


MASKED.add("SeededDropoutFunctionBackward")


@functools.lru_cache(maxsize=256)
def _scale(p: float, dtype: torch.dtype, device: str) -> float:
    """1 / (1 - p), rounded as PyTorch's dropout rounds it on a `device` of this type."""
    if p == 1:
        return 0.0
    if device != "cpu" and dtype != torch.float64:
        dtype = torch.float32
    with no_dispatch():  # a real number under fake tensors too
        return float(torch.ones((), dtype=dtype, device="cpu").div_(1 - p))


def _dropped_out(x: Tensor, mask: Mask) -> Tensor:
    if x.is_meta or skips_pieces(x):
        return torch.empty_like(x)
    precision = accumulation_dtype(x.dtype)
    factors = torch.zeros(x.shape, dtype=precision, device=x.device)
    flat = factors.view(-1)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        index = torch.arange(start, start + part.numel(), device=x.device)
        part.masked_fill_(uniform(index, mask.seed) >= mask.threshold, mask.scale)
    # For 16-bit tensors each product is exact in fp32, or rounded as on a GPU.
    return (x * factors).to(x.dtype)
