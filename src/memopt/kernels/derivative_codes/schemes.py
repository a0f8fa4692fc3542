"""Codes of an activation's derivative: the schemes, and the thresholds and levels of one code.

    forward   code[i] = a small number that stands for f'(z[i])          backward   dz[i] = dh[i] * levels[code[i]]

The forward is exact and z is not saved; the gradient is approximate. Two families of codes:

- Step codes (2 and 3 bits): the number of thresholds below z. f' is taken as a step function of z.
- Value codes (4 and 8 bits): the nearest of equally spaced levels to f'(z).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from memopt.errors import MemoptError
from memopt.torch_compat.activations import Elementwise

SCHEMES = ("published", "2bit", "3bit", "4bit", "8bit")
#: Elements that share one flag for NaN.
FLAG_GROUP = 1024

#: Kind -> name, slopes a and thresholds c of the published derivative sum_i a_i [z > c_i]: arXiv 2406.16282 (ReGELU2,
#: ReSiLU2). quick_gelu(z) = silu(1.702 z) / 1.702 has the slopes of SiLU and thresholds of c / 1.702.
PUBLISHED: dict[str, tuple[str, tuple[float, ...], tuple[float, ...]]] = {
    "gelu_erf": (
        "ReGELU2",
        (-0.04922261145617846, 1.0979632065417297, -0.048740595085551286),
        (-3.1858810036855245, -0.001178821281161997, 3.190832613414926),
    ),
    "silu": (
        "ReSiLU2",
        (-0.04060357190528599, 1.080925428529668, -0.040321856624382146),
        (-6.3050461001646445, -0.0008684942046214787, 6.325815242089708),
    ),
}
PUBLISHED["quick_gelu"] = (*PUBLISHED["silu"][:2], tuple(c / 1.702 for c in PUBLISHED["silu"][2]))


class CodeError(MemoptError, ValueError):
    """The activation has no such code."""


@dataclass(frozen=True)
class DerivativeCode:
    """The code of one activation."""

    name: str
    kind: str
    """The key of `memopt.torch_compat.activations.ACTIVATIONS`, or "other"."""
    bits: int
    """1, 2, 3, 4 or 8."""
    thresholds: tuple[float, ...]
    """Rising thresholds of a step code; empty for a value code."""
    levels: tuple[float, ...]
    """The 2**bits values of the derivative, by code. A value code's levels are equally spaced and exact in fp32."""
    error: float = math.nan
    """Relative RMS error of the derivative for z ~ N(0, 1)."""
    function: Elementwise | None = field(default=None, repr=False)
    """The activation, if `kind` is "other"."""

    @property
    def scheme(self) -> str:
        """The scheme for `derivative_code` that finds this code: published codes have names of their own."""
        return self.name if self.name in SCHEMES else "published"

    @property
    def step(self) -> float:
        """Distance of a value code's levels."""
        return self.levels[1] - self.levels[0]

    def code_bytes(self, elements: int) -> int:
        """Bytes of the packed codes, without the flags."""
        return -(-elements * self.bits // 8)

    def packed_bytes(self, elements: int) -> int:
        """Bytes of the result of `encode` for so many elements: codes and flags."""
        return self.code_bytes(elements) - (-elements // FLAG_GROUP)


#: ReLU's derivative is one bit of its input, or of its output: this code is exact.
RELU_MASK = DerivativeCode("mask", "relu", 1, thresholds=(0.0,), levels=(0.0, 1.0), error=0.0)


def published_code(kind: str, error: float = math.nan) -> DerivativeCode:
    """The published 2-bit code of a key of :data:`PUBLISHED`."""
    name, slopes, thresholds = PUBLISHED[kind]
    return DerivativeCode(name, kind, 2, thresholds, (0.0, *itertools.accumulate(slopes)), error=error)


def derivative(function: Elementwise, z: Tensor) -> Tensor:
    """f'(z) by autograd, shaped like z."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        (slope,) = torch.autograd.grad(function(z).sum(), z)
    return slope


def bits_of(scheme: str) -> int:
    return int(scheme[0])


def require_scheme(scheme: str) -> None:
    if scheme not in SCHEMES:
        raise CodeError(f"There is no code named {scheme!r}.", f"Codes: {', '.join(SCHEMES)}.")


def fp32_below(value: float) -> float:
    """The largest fp32 number that is not above `value`: z > value and z > this are the same for every fp32 z."""
    nearest = np.float32(value)
    if float(nearest) > value:
        nearest = np.nextafter(nearest, np.float32(-math.inf))
    return float(nearest)
