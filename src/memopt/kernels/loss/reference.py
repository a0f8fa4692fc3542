"""Cross-entropy by rows in plain PyTorch: the formulas, and what runs wherever the Triton kernels do not.

With m = max_j x_j, s = sum_j exp(x_j - m), p_j = exp(x_j - m - log s), target t, class weights w (else 1) with sum W,
label smoothing e and V classes, as `torch.nn.functional.cross_entropy` has it:

    loss    = (1 - e) w_t (m + log s - x_t) + e / V sum_j w_j (m + log s - x_j)
    dx_j    = dloss ((1 - e) w_t (p_j - [j = t]) + e / V (W p_j - w_j))

Both are 0 for a row whose target is `ignore_index`. Statistics and sums are in fp32, for fp64 in fp64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from memopt.kernels.base.precision import accumulation_dtype

#: Logits of which a wide copy exists at a time, or those of one row.
_PIECE = 2**20


@dataclass(frozen=True)
class LossArguments:
    """What `torch.nn.functional.cross_entropy` is called with beside logits, targets and the reduction."""

    weight: Tensor | None = None
    """(V,), of each class."""
    label_smoothing: float = 0.0
    ignore_index: int = -100


def rows_loss(logits: Tensor, target: Tensor, picked: Tensor, arguments: LossArguments) -> tuple[Tensor, Tensor]:
    """The loss (n,) and the pair m, log s (n, 2) of every row; `picked` (n,) is -x_t."""
    dtype, smoothing, classes = accumulation_dtype(logits.dtype), arguments.label_smoothing, logits.size(1)
    lse = logits.new_empty(len(logits), 2, dtype=dtype)
    total = logits.new_empty(len(logits), dtype=dtype)
    weight = None if arguments.weight is None else arguments.weight.to(dtype)
    for rows in _pieces(logits):
        x = logits[rows].to(dtype)
        top = x.amax(1)
        lse[rows, 0] = top
        x = x - top[:, None]
        if smoothing:
            total[rows] = (x if weight is None else x * weight).sum(1)
        lse[rows, 1] = x.exp_().sum(1).log_()
    top, log_sum = lse.unbind(1)
    loss = _share(target, arguments, dtype, classes) * (log_sum + (top + picked.to(dtype)))
    if smoothing:
        loss += smoothing / classes * (log_sum * (classes if weight is None else weight.sum()) - total)
    return loss.masked_fill_(target == arguments.ignore_index, 0.0), lse


def rows_gradient(
    logits: Tensor, target: Tensor, lse: Tensor, dloss: Tensor, arguments: LossArguments, out: Tensor
) -> Tensor:
    """dx (n, V) in `out`, which may be `logits` itself; `lse` is that of :func:`rows_loss`."""
    dtype, classes = lse.dtype, logits.size(1)
    ignored = target == arguments.ignore_index
    of_target = dloss.to(dtype) * _share(target, arguments, dtype, classes)
    uniform = dloss.to(dtype) * (arguments.label_smoothing / classes)
    weight = logits.new_ones((), dtype=dtype) if arguments.weight is None else arguments.weight.to(dtype)
    of_all = weight.expand(classes).sum()
    place = target.long().masked_fill(ignored, 0)[:, None]
    for rows in _pieces(logits):
        p = (logits[rows].to(dtype) - lse[rows, :1]).sub_(lse[rows, 1:]).exp_()
        dx = p * of_target[rows, None]
        dx.scatter_add_(1, place[rows], -of_target[rows, None])
        if arguments.label_smoothing:
            dx.addcmul_(uniform[rows, None], p.mul_(of_all).sub_(weight))
        out[rows] = dx.masked_fill_(ignored[rows, None], 0.0)
    return out


def _share(target: Tensor, arguments: LossArguments, dtype: torch.dtype, classes: int) -> Tensor:
    """(1 - e) w_t of each row; of ignored rows any number."""
    if arguments.weight is None:
        return torch.full_like(target, 1 - arguments.label_smoothing, dtype=dtype)
    return (1 - arguments.label_smoothing) * arguments.weight.to(dtype)[target.long().clamp(0, classes - 1)]


def _pieces(logits: Tensor) -> Iterator[slice]:
    step = max(1, _PIECE // max(1, logits.size(1)))
    for start in range(0, len(logits), step):
        yield slice(start, start + step)
