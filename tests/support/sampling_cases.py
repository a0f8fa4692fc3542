"""Rows whose weight gradient is known, and what many draws of a sampler make of it. For benchmarks.sampling and tests.

A draw is seen through the weight that it gives each of the n rows. That weight less 1 is what the row is off by, so the
error of dW is a quadratic form in it: no estimate of dW has to be made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from memopt.kernels.sampled_linear.sampling import Method, expected_error, rows_kept, sample_rows

ROWS, BUDGET, DRAWS = 256, 0.3, 4000
KEPT = rows_kept(ROWS, BUDGET)
#: Standard errors that the mean of the draws may be away from dW.
LIMIT = 3.0
#: Relative error of a sum of a few hundred products in fp64, for estimates that are exact.
ROUNDING = 1e-12
_IN, _OUT = 12, 10

Sampler = Callable[[Tensor, int, Method, torch.Generator], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    name: str
    x: Tensor
    """(n, in), fp64."""
    dy: Tensor
    """(n, out), fp64."""
    scores: Tensor
    """(n,), fp32."""

    @property
    def products(self) -> Tensor:
        """Inner products of the rows' parts of dW, (n, n)."""
        return (self.x @ self.x.t()) * (self.dy @ self.dy.t())


@dataclass(frozen=True)
class Outcome:
    """What the draws of one sampler gave. Errors are relative to |dW|."""

    case: str
    method: Method
    draws: int
    off: float
    """Of the mean of the draws."""
    measured: float
    """Root mean square of a draw's error."""
    expected: float
    """The same by the formula."""
    spread: float
    """Standard error of measured**2, relative to it."""

    @property
    def z(self) -> float:
        """`off` in standard errors of the mean."""
        return self.off / self.expected * math.sqrt(self.draws) if self.expected else 0.0

    @property
    def unbiased(self) -> bool:
        return self.z < LIMIT if self.expected else self.off < ROUNDING

    @property
    def ratio(self) -> float:
        """Measured variance over the expected one."""
        return (self.measured / self.expected) ** 2 if self.expected else 1.0


def cases() -> dict[str, Case]:
    """The kinds of scores that samplers have been wrong on, by name."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, _IN, generator=generator, dtype=torch.float64)
    dy = torch.randn(ROWS, _OUT, generator=generator, dtype=torch.float64)
    heavy = dy * torch.randn(ROWS, 1, generator=generator, dtype=torch.float64).mul(1.5).exp()
    unit_x, unit_dy = (t / t.norm(dim=1, keepdim=True) for t in (x, dy))
    row = torch.arange(ROWS)[:, None]
    made = (
        scored("heavy-tailed", x, heavy),
        Case("flat", unit_x, unit_dy, torch.ones(ROWS)),
        Case("empty cache", x, heavy, x.norm(dim=1).float()),
        scored("1e-9-scaled", x, 1e-9 * heavy),
        scored("part-zero", x * (row % 3 > 0), heavy),
        scored("single row", x * (row == 100), heavy),
        scored("few rows", x * (row % 4 == 1), heavy),
    )
    return {case.name: case for case in made}


def scored(name: str, x: Tensor, dy: Tensor) -> Case:
    """With scores |x_i| |dy_i|."""
    return Case(name, x, dy, (x.norm(dim=1) * dy.norm(dim=1)).float())


def draw(
    case: Case, method: Method, draws: int, generator: torch.Generator, k: int = KEPT, sampler: Sampler = sample_rows
) -> Tensor:
    """Weight less 1 of each row in each draw, (draws, n)."""
    off = torch.full((draws, len(case.scores)), -1.0, dtype=torch.float64)
    for one in off:
        rows, weights = sampler(case.scores, k, method, generator)
        one.index_add_(0, rows, weights.double())
    return off


def outcome(case: Case, method: Method, off: Tensor, k: int = KEPT) -> Outcome:
    """What the draws `off` say, against the formula for `method`."""
    products = case.products
    truth = products.sum()
    squares = ((off @ products) * off).sum(1) / truth
    mean = off.mean(0)
    return Outcome(
        case=case.name,
        method=method,
        draws=len(off),
        off=float((mean @ products @ mean / truth).clamp(min=0).sqrt()),
        measured=float(squares.mean().clamp(min=0).sqrt()),
        expected=expected_error(case.x, case.dy, case.scores, k, method),
        spread=float(squares.std() / squares.mean() / math.sqrt(len(off))) if squares.mean() > 0 else 0.0,
    )
