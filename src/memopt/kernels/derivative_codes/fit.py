"""Fits the thresholds and levels of the codes of an activation's derivative; `tools/fit_codes.py` writes codes.json.

A step code minimises the integral of (f' - its steps)**2 over the real line, with the outer levels at the limits of f'
so that the integral is finite. Dynamic programming on a grid finds the best segments. Newton's method then solves the
conditions of a minimum: f' at a threshold is the mean of the levels beside it, and a level is the mean of f' over its
segment, (f(b) - f(a)) / (b - a). A value code's levels run from the minimum to the maximum of f'. All in fp64.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from memopt.kernels.derivative_codes.schemes import CodeError, bits_of, derivative
from memopt.torch_compat.activations import ACTIVATIONS, Elementwise

#: The kinds with a continuous derivative that has two different limits. With equal limits (tanh, sigmoid) the best
#: steps are not unique: the mirror image is as good.
KINDS = tuple(
    kind for kind, row in ACTIVATIONS.items() if row.continuous and row.slopes is not None and len({*row.slopes}) == 2
)

_CELLS = 1600
DECIMALS = 12
#: Distance from 0 at which the derivative counts as its limit.
_FAR = 64.0
_NORMAL_RANGE, _NORMAL_POINTS = 10.0, 2**20 + 1


def fit(function: Elementwise, scheme: str) -> dict[str, Any]:
    """The code of `function`: "thresholds", "levels" and "error" of a step code, "low", "step" and "error" of a value
    code (level i is low + i * step).

    Raises:
        CodeError: the derivative of `function` has no limit on either side.
    """
    bits = bits_of(scheme)
    if bits <= 3:
        thresholds, levels = _fit_steps(function, bits)
        rounded = ([round(x, DECIMALS) + 0.0 for x in numbers] for numbers in (thresholds.tolist(), levels.tolist()))
        found: dict[str, Any] = dict(zip(("thresholds", "levels"), rounded, strict=True))
        error = step_error(function, found["thresholds"], found["levels"])
    else:
        low, step = _fit_values(function, bits)
        found = {"low": low, "step": step}
        error = _value_error(function, low, step, 2**bits)
    return {**found, "error": round(error, DECIMALS)}


def step_error(function: Elementwise, thresholds: list[float], levels: list[float]) -> float:
    """RMS(steps - f') / RMS(f') for z ~ N(0, 1)."""
    z, weight = _normal()
    slope = derivative(function, z)
    # Number of thresholds strictly below z.
    codes = torch.bucketize(z, torch.tensor(thresholds, dtype=z.dtype))
    squares = (torch.tensor(levels, dtype=z.dtype)[codes] - slope).square()
    return math.sqrt((weight @ squares).item() / (weight @ slope.square()).item())


# --- step codes ------------------------------------------------------------------------------------------------------


def _fit_steps(function: Elementwise, bits: int) -> tuple[Tensor, Tensor]:
    limits = _limits(function)
    edges = torch.linspace(-1, 1, _CELLS + 1, dtype=torch.float64) * _reach(function, limits)
    coarse = edges[_best_edges(function, edges, limits, 2**bits)]
    fine = _polished(function, coarse, limits)
    return fine, _levels(function, fine, limits)


def _limits(function: Elementwise) -> tuple[float, float]:
    """f' at minus and plus infinity."""
    far = torch.tensor([-_FAR, -0.75 * _FAR, 0.75 * _FAR, _FAR], dtype=torch.float64)
    low, nearly_low, nearly_high, high = derivative(function, far).tolist()
    if not (abs(low - nearly_low) < 1e-6 and abs(high - nearly_high) < 1e-6):  # also where one is NaN
        raise CodeError(
            f"The derivative of this activation has no limit: it is {low:g} at {-_FAR:g} and {high:g} at {_FAR:g}, and "
            f"{nearly_low:g} and {nearly_high:g} a quarter nearer to 0.",
            "Codes are for activations that become straight lines on either side; keep its input instead.",
        )
    return low, high


def _reach(function: Elementwise, limits: tuple[float, float]) -> float:
    """The distance from 0 within which the derivative differs from its limits."""
    for reach in (8.0, 16.0, 32.0):
        ends = derivative(function, torch.tensor([-reach, reach], dtype=torch.float64)).tolist()
        if all(abs(end - limit) < 1e-3 for end, limit in zip(ends, limits, strict=True)):
            return reach
    return _FAR


def _best_edges(function: Elementwise, edges: Tensor, limits: tuple[float, float], count: int) -> Tensor:
    """The count - 1 edges between the `count` segments with the least sum of squares, the outer ones at the limits."""
    slope = derivative(function, (edges[1:] + edges[:-1]) / 2)

    def up_to(values: Tensor) -> Tensor:
        return torch.cat([values.new_zeros(1), values.cumsum(0)])

    sums, squares = up_to(slope), up_to(slope.square())
    index = torch.arange(len(edges))
    cells = (index[None, :] - index[:, None]).double()
    # From edge i (row) to edge j (column), with the mean as the level.
    cost = squares[None, :] - squares[:, None] - (sums[None, :] - sums[:, None]).square() / cells
    cost.masked_fill_(cells <= 0, math.inf)
    left, right = (up_to((slope - limit).square()) for limit in limits)
    best, previous = left, []
    for _ in range(count - 2):
        best, chosen = (best[:, None] + cost).min(0)
        previous.append(chosen)
    path = [int((best + right[-1] - right).argmin())]
    for chosen in reversed(previous):
        path.append(int(chosen[path[-1]]))
    return torch.tensor(path[::-1])


def _polished(function: Elementwise, coarse: Tensor, limits: tuple[float, float]) -> Tensor:
    """The thresholds near `coarse` that fulfil the conditions of a minimum; `coarse` if Newton's method fails, at a
    jump or kink of f'."""

    def residual(thresholds: Tensor) -> Tensor:
        levels = _levels(function, thresholds, limits)
        return derivative(function, thresholds) - (levels[..., 1:] + levels[..., :-1]) / 2

    thresholds, shift = coarse, 1e-5 * torch.eye(len(coarse), dtype=torch.float64)
    for _ in range(20):
        # Row i: derivatives with respect to threshold i.
        jacobian = (residual(thresholds + shift) - residual(thresholds - shift)) / 2e-5
        step, info = torch.linalg.solve_ex(jacobian.T, residual(thresholds))
        if info:
            return coarse
        thresholds = thresholds - step
    near = (thresholds - coarse).abs().max() < 0.25 and (thresholds.diff() > 0).all()
    return thresholds if near and residual(thresholds).abs().max() < 1e-11 else coarse


def _levels(function: Elementwise, thresholds: Tensor, limits: tuple[float, float]) -> Tensor:
    """The means of f' between thresholds (last dimension), with the limits around them."""
    low, high = (torch.full_like(thresholds[..., :1], limit) for limit in limits)
    return torch.cat([low, function(thresholds).diff() / thresholds.diff(), high], -1)


# --- value codes -----------------------------------------------------------------------------------------------------


def _fit_values(function: Elementwise, bits: int) -> tuple[float, float]:
    """The lowest level and the distance of 2**bits levels that span the values of f'.

    Both are multiples of a power of two (2**-22 for values up to 2), so that every level low + i * step is exact in
    fp32.
    """
    _limits(function)
    least, most = -_greatest(lambda z: -derivative(function, z)), _greatest(lambda z: derivative(function, z))
    unit = 2.0 ** (math.frexp(max(abs(least), abs(most)))[1] - 23)
    low = math.floor(least / unit + 1e-3) * unit
    step = math.ceil((most - low) / (2**bits - 1) / unit - 1e-3) * unit
    return low, step


def _greatest(slope: Elementwise) -> float:
    z = torch.linspace(-_FAR, _FAR, 2**16 + 1, dtype=torch.float64)
    for _ in range(4):
        values = slope(z)
        peak, width = z[values.argmax()].item(), (z[1] - z[0]).item()
        z = torch.linspace(peak - width, peak + width, 1001, dtype=torch.float64).clamp(-_FAR, _FAR)
    return values.max().item()


def _value_error(function: Elementwise, low: float, step: float, count: int) -> float:
    """RMS(level - f') / RMS(f') for z ~ N(0, 1)."""
    z, weight = _normal()
    slope = derivative(function, z)
    place = (slope - low) / step
    squares = (place - (place + 0.5).floor().clamp(0, count - 1)).square()
    return step * math.sqrt((weight @ squares).item() / (weight @ slope.square()).item())


def _normal() -> tuple[Tensor, Tensor]:
    """Points, and the weight of each under N(0, 1)."""
    z = torch.linspace(-_NORMAL_RANGE, _NORMAL_RANGE, _NORMAL_POINTS, dtype=torch.float64)
    weight = (-0.5 * z.square()).exp()
    return z, weight / weight.sum()
