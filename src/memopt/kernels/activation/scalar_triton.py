"""The known activations inside a Triton kernel: value, slope and gradient of one element, fp32 in and out.

The definitions are those of `memopt.torch_compat.activations`; results for NaN and infinity are PyTorch's. The kernels
use only operations that every back end and the interpreter have (no libdevice). So tanh, expm1 and log1p are computed
from exp here, in forms that neither overflow nor cancel.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_SQRT_HALF_OVER_PI = tl.constexpr(0.3989422804014327)
_SQRT_8_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def value(z, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """f(z)."""
    if KIND == "gelu_erf":
        h = z * (0.5 + 0.5 * tl.erf(z * _SQRT_HALF))
    elif KIND == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2u), which keeps its digits where tanh(u) is near -1.
        h = z * _sigmoid((z + 0.044715 * z * z * z) * _SQRT_8_OVER_PI)
    elif KIND == "quick_gelu":
        h = z * _sigmoid(1.702 * z)
    elif KIND == "silu":
        h = z * _sigmoid(z)
    elif KIND == "relu":
        h = tl.where(z <= 0, 0.0, z)
    elif KIND == "relu2":
        h = tl.where(z <= 0, 0.0, z * z)
    elif KIND == "relu6":
        h = tl.where(z <= 0, 0.0, tl.where(z >= 6, 6.0, z))
    elif KIND == "leaky_relu":
        h = tl.where(z > 0, z, 0.01 * z)
    elif KIND == "tanh":
        h = _tanh(z)
    elif KIND == "sigmoid":
        h = _sigmoid(z)
    elif KIND == "hardsigmoid":
        h = _hardsigmoid(z)
    elif KIND == "hardswish":
        h = z * _hardsigmoid(z)
    elif KIND == "mish":
        numerator, rest = _tanh_of_softplus(z)
        h = z * (numerator / (numerator + rest))
    elif KIND == "softplus":
        h = tl.where(z <= 0, 0.0, z) + _log1p_of_fraction(tl.exp(-tl.abs(z)))
    elif KIND == "elu":
        h = tl.where(z <= 0, _expm1_of_negative(z), z)
    return h


@triton.jit
def slope(z, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """f'(z)."""
    if KIND == "gelu_erf":
        d = 0.5 + 0.5 * tl.erf(z * _SQRT_HALF) + z * (tl.exp(-0.5 * z * z) * _SQRT_HALF_OVER_PI)
    elif KIND == "gelu_tanh":
        v = (z + 0.044715 * z * z * z) * _SQRT_8_OVER_PI
        d = _sigmoid(v) + z * _sigmoid_slope(v) * ((1 + 0.134145 * z * z) * _SQRT_8_OVER_PI)
    elif KIND == "quick_gelu":
        v = 1.702 * z
        d = _sigmoid(v) + v * _sigmoid_slope(v)
    elif KIND == "silu":
        d = _sigmoid(z) + z * _sigmoid_slope(z)
    elif KIND == "relu":
        d = tl.where(z <= 0, 0.0, 1.0)
    elif KIND == "relu2":
        d = tl.where(z <= 0, 0.0, 2 * z)
    elif KIND == "relu6":
        d = tl.where((z <= 0) | (z >= 6), 0.0, 1.0)
    elif KIND == "leaky_relu":
        d = tl.where(z > 0, 1.0, 0.01)
    elif KIND == "tanh":
        d = 4 * _sigmoid_slope(2 * z)
    elif KIND == "sigmoid":
        d = _sigmoid_slope(z)
    elif KIND == "hardsigmoid":
        d = tl.where((z > -3) & (z < 3), 1.0 / 6, 0.0)
    elif KIND == "hardswish":
        d = tl.where(z <= -3, 0.0, tl.where(z >= 3, 1.0, z / 3 + 0.5))
    elif KIND == "mish":
        numerator, rest = _tanh_of_softplus(z)
        denominator = numerator + rest
        one_minus_square = rest * (denominator + numerator) / (denominator * denominator)
        d = numerator / denominator + z * _sigmoid(z) * one_minus_square
    elif KIND == "softplus":
        d = _sigmoid(z)
    elif KIND == "elu":
        d = tl.where(z > 0, 1.0, tl.exp(z))
    return d


@triton.jit
def value_and_slope(z, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """f(z) and f'(z). Common terms are written alike in both, so that the compiler computes them once."""
    return value(z, KIND), slope(z, KIND)


@triton.jit
def gradient(dh, z, slope_of_z, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """dh * f'(z), and 0 if f is flat even if dh is not finite, as PyTorch has it."""
    dz = dh * slope_of_z
    if KIND == "relu" or KIND == "relu2":
        dz = tl.where(z <= 0, 0.0, dz)
    elif KIND == "relu6":
        dz = tl.where((z <= 0) | (z >= 6), 0.0, dz)
    elif KIND == "hardsigmoid":
        dz = tl.where((z > -3) & (z < 3), dz, 0.0)
    elif KIND == "hardswish":
        dz = tl.where(z <= -3, 0.0, dz)
    return dz


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1 + e)


@triton.jit
def _sigmoid_slope(x):  # type: ignore[no-untyped-def]
    """s * (1 - s) of the sigmoid s, without the cancellation in 1 - s."""
    e = tl.exp(-tl.abs(x))
    return e / ((1 + e) * (1 + e))


@triton.jit
def _hardsigmoid(x):  # type: ignore[no-untyped-def]
    return tl.where(x <= -3, 0.0, tl.where(x >= 3, 6.0, x + 3)) / 6


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    m = _expm1_of_negative(-2 * tl.abs(x))
    t = -m / (2 + m)
    return tl.where(x < 0, -t, t)


@triton.jit
def _tanh_of_softplus(x):  # type: ignore[no-untyped-def]
    """n and r, where tanh(softplus(x)) = n / (n + r)."""
    e = tl.exp(-tl.abs(x))
    n = tl.where(x < 0, e * (e + 2), 1 + 2 * e)
    return n, tl.where(x < 0, 2.0, 2 * e * e)


@triton.jit
def _expm1_of_negative(x):  # type: ignore[no-untyped-def]
    """exp(x) - 1 for x <= 0. Near 0, where the difference cancels, the Taylor series (to 1e-8 of its value)."""
    series = 1 + x * (1.0 / 10)
    series = 1 + x * (1.0 / 9) * series
    series = 1 + x * (1.0 / 8) * series
    series = 1 + x * (1.0 / 7) * series
    series = 1 + x * (1.0 / 6) * series
    series = 1 + x * (1.0 / 5) * series
    series = 1 + x * (1.0 / 4) * series
    series = 1 + x * (1.0 / 3) * series
    series = 1 + x * (1.0 / 2) * series
    return tl.where(x > -0.7, x * series, tl.exp(x) - 1)


@triton.jit
def _log1p_of_fraction(x):  # type: ignore[no-untyped-def]
    """log(1 + x) for 0 <= x <= 1: the series of 2 artanh(s), s = x / (2 + x) <= 1/3 (to 1e-9 of its value)."""
    s = x / (2 + x)
    q = s * s
    series = 1.0 / 13 + q * (1.0 / 15)
    series = 1.0 / 11 + q * series
    series = 1.0 / 9 + q * series
    series = 1.0 / 7 + q * series
    series = 1.0 / 5 + q * series
    series = 1.0 / 3 + q * series
    return 2 * s * (1 + q * series)
