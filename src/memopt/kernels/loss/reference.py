"""Cross-entropy of rows in plain PyTorch: the formulas, and the code that runs where the Triton kernels do not.

With m = max_j x_j, s = sum_j exp(x_j - m), p_j = exp(x_j - m - log s), target t, class weights w (else 1) with sum W,
label smoothing e and V classes, as `torch.nn.functional.cross_entropy` has it:

    loss    = (1 - e) w_t (m + log s - x_t) + e / V (W (m + log s) - sum_j w_j x_j)
    dx_j    = hit (p_j - [j = t]) + flat (W p_j - w_j)          hit = dloss (1 - e) w_t,   flat = dloss e / V

m, s and the last sum are computed over one or many blocks of columns (Milakov, Gimelshein 2018). Statistics and sums
are in fp32 (fp64 for fp64). m and log s stay two numbers: their fp32 sum would lose digits of a p near 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.kernels.base.autograd import accumulation_dtype, autocast_as
from memopt.kernels.base.device import skips_pieces
from memopt.kernels.base.pieces import slices

#: Most logits with a wide copy at a time (but at least one row).
_PIECE = 2**20


@dataclass(frozen=True)
class LossArguments:
    """Arguments of `torch.nn.functional.cross_entropy` beside logits, targets and the reduction."""

    weight: Tensor | None = None
    """(V,): the weight of each class."""
    label_smoothing: float = 0.0
    ignore_index: int = -100


@dataclass(frozen=True)
class RowFactors:
    """Factors of the parts of a row's gradient; 0 for ignored rows."""

    hit: Tensor
    """(n,)"""
    flat: Tensor | None
    """(n,); None without label smoothing."""
    weight_sum: Tensor | float
    """The sum of the weights of all classes."""

    def __getitem__(self, part: slice) -> RowFactors:
        """The factors of some of the rows."""
        return RowFactors(self.hit[part], None if self.flat is None else self.flat[part], self.weight_sum)


def update_statistics(
    logits: Tensor, statistics: Tensor, weight: Tensor | None, smoothed: bool, target: Tensor | None = None
) -> None:
    """Adds a block (n, B) to `statistics` (n, 4): m, s, sum_j w_j x_j (if `smoothed`), and x_t of `target` (n,), which
    counts from the block's first column."""
    for rows in _pieces(logits):
        top, total, of_all, picked = statistics[rows].unbind(1)
        x = logits[rows].to(statistics.dtype)
        if target is not None:
            place = target[rows].clamp(0, x.size(1) - 1)
            picked.copy_(torch.where(place == target[rows], x.gather(1, place[:, None])[:, 0], picked))
        if smoothed:
            of_all += (x if weight is None else x * weight.to(x.dtype)).sum(1)
        above = torch.maximum(top, x.amax(1))
        base = above.masked_fill(above == -torch.inf, 0.0)  # a row of only -inf so far adds 0, not NaN
        total *= (top - base).exp_()
        total += (x - base[:, None]).exp_().sum(1)
        top.copy_(above)


def block_gradient(
    logits: Tensor, target: Tensor, lse: Tensor, factors: RowFactors, weight: Tensor | None, out: Tensor
) -> None:
    """dx of a block (n, B) into `out`, which may be `logits` itself; `target` counts from the block's first column."""
    dtype, (_, columns) = lse.dtype, logits.shape
    inside = (target >= 0) & (target < columns)
    place, hit = target.clamp(0, max(0, columns - 1))[:, None], factors.hit[:, None]
    unused = hit == 0 if factors.flat is None else (hit == 0) & (factors.flat[:, None] == 0)
    for rows in _pieces(logits):
        p = (logits[rows].to(dtype) - lse[rows, :1]).sub_(lse[rows, 1:]).exp_()
        dx = p * hit[rows]
        dx.scatter_add_(1, place[rows], -hit[rows] * inside[rows, None])
        if factors.flat is not None:
            each = 1.0 if weight is None else weight.to(dtype)
            dx.addcmul_(factors.flat[rows, None], p.mul_(factors.weight_sum).sub_(each))
        out[rows] = dx.masked_fill_(unused[rows], 0.0)


def _pieces(logits: Tensor) -> Iterator[slice]:
    if skips_pieces(logits):
        return iter(())  # no values; as with Triton kernels, nothing is allocated
    return slices(logits, max(1, _PIECE // max(1, logits.size(1))))


def losses_of(y: Tensor, target: Tensor, arguments: LossArguments) -> Tensor:
    """The losses (rows,) of logits (rows, V), 0 if the target is ignored: in fp32, or fp64 for fp64."""
    dtype = accumulation_dtype(y.dtype)
    with autocast_as(None, y):
        return F.cross_entropy(
            y.to(dtype),
            target.to(dtype) if target.is_floating_point() else target,
            None if arguments.weight is None else arguments.weight.to(dtype),
            ignore_index=arguments.ignore_index,
            reduction="none",
            label_smoothing=arguments.label_smoothing,
        )
