"""Cross-entropy of rows: statistics in one read of the logits, their gradient in one read and one write.

The logits may be there whole, or a block of columns at a time (`memopt.kernels.loss.reference` has the formulas):

    whole      cross_entropy_rows, cross_entropy_backward_; rows_gradient_ for both at once
    blocks     fresh_statistics, block_statistics_ for each block, row_losses; row_factors, block_gradient_ for each

These know nothing of autograd; :func:`lean_cross_entropy` does, for logits that are kept whole.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.kernels.base.autograd import (
    DirectFunction,
    autocast_as,
    batched_gradients,
    is_batched,
    refuse_double_backward,
)
from memopt.kernels.base.device import runs_triton
from memopt.kernels.base.precision import accumulation_dtype
from memopt.kernels.loss.reference import LossArguments, RowFactors, block_gradient, losses_of, update_statistics

Reduction = Literal["none", "mean", "sum"]


@torch.no_grad()
def cross_entropy_rows(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """The loss of every row, as ``F.cross_entropy(..., reduction="none")`` of the logits in fp32.

    Args:
        logits: (n, V), any floating dtype and strides.
        target: (n,), int64 or uint8.
        weight: (V,), of each class.

    Returns:
        The loss (n,) and what the gradient needs of each row, (n, 2): its maximum m and log(sum(exp(x - m))), whose
        sum is the logsumexp. Both fp32; fp64 for fp64.

    Raises:
        IndexError: a target is neither a class nor `ignore_index`; on a GPU a device-side assertion fails.
    """
    with autocast_as(None, logits):
        in_range(target, ignore_index, logits.size(1))
        statistics, target = fresh_statistics(logits), target.long()
        block_statistics_(logits, statistics, target, weight=weight, smoothed=bool(label_smoothing))
        return row_losses(statistics, target, LossArguments(weight, label_smoothing, ignore_index), logits.size(1))


def in_range(target: Tensor, ignore_index: int, classes: int) -> None:
    """The stock operator's IndexError for a target that is no class; on a GPU a device-side assertion."""
    nothing = torch.zeros((1, 1), device=target.device).expand(len(target), classes)
    F.nll_loss(nothing, target, reduction="none", ignore_index=ignore_index)


@torch.no_grad()
def cross_entropy_backward_(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    dloss: Tensor,
    *,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient (n, V) of the logits, in their dtype, written over them or, where given, into `out`.

    Args:
        logits, target, weight, label_smoothing, ignore_index: as for :func:`cross_entropy_rows`; the rows of what is
            written may not overlap.
        lse: (n, 2), its second result.
        dloss: (n,), the gradient of each row's loss; any strides, 0 too.
        out: the shape and dtype of `logits`.
    """
    arguments = LossArguments(weight, label_smoothing, ignore_index)
    factors = row_factors(target, dloss.to(lse.dtype), arguments, logits.size(1))
    return block_gradient_(logits, target.long(), lse, factors, weight=weight, out=out)


def fresh_statistics(rows: Tensor) -> Tensor:
    """Those of no columns yet, (n, 4) for `rows` (n, ...): what :func:`block_statistics_` starts from."""
    statistics = rows.new_zeros(len(rows), 4, dtype=accumulation_dtype(rows.dtype))
    statistics[:, 0] = -torch.inf
    return statistics


@torch.no_grad()
def block_statistics_(
    logits: Tensor, statistics: Tensor, target: Tensor, *, weight: Tensor | None = None, smoothed: bool = False
) -> None:
    """Takes a block of columns into the statistics of their rows, in place.

    Args:
        logits: (n, B), any floating dtype and strides.
        statistics: (n, 4) contiguous: maximum, sum of exp(x - maximum), where `smoothed` sum of weight * x, and the
            logit of the target.
        target: (n,) int64, counted from the block's first column; one outside of the block picks nothing.
        weight: (B,) of the block's classes; read where `smoothed`.
    """
    if runs_triton(logits, statistics, weight):
        import memopt.kernels.loss.function_triton as kernels

        kernels.launch_statistics(logits, statistics, weight, smoothed, target)
    else:
        update_statistics(logits, statistics, weight, smoothed, target)


@torch.no_grad()
def rows_gradient_(
    logits: Tensor, statistics: Tensor, target: Tensor, factors: RowFactors, *, weight: Tensor | None, out: Tensor
) -> Tensor:
    """:func:`block_statistics_` and :func:`block_gradient_` of whole rows in one, into `out`, which may be `logits`."""
    smoothed = factors.flat is not None
    if runs_triton(logits, statistics, weight, out):
        import memopt.kernels.loss.function_triton as kernels

        kernels.launch_statistics(logits, statistics, weight, smoothed, target, factors, out)
    else:
        update_statistics(logits, statistics, weight, smoothed, target)
        lse = torch.stack((statistics[:, 0], statistics[:, 1].log()), 1)
        block_gradient(logits, target, lse, factors, weight, out)
    return out


@torch.no_grad()
def row_losses(statistics: Tensor, target: Tensor, arguments: LossArguments, classes: int) -> tuple[Tensor, Tensor]:
    """The loss (n,) of each row, 0 where it is ignored, and its pair m, log s (n, 2), of the dtype of `statistics`.

    Args:
        statistics: (n, 4), of all columns.
        target: (n,), a class or `ignore_index`.
    """
    top, total, of_all, picked = statistics.unbind(1)
    log_sum = total.log()
    hit, weight_sum = _target_weights(target, arguments, classes, statistics.dtype)
    loss = hit * (log_sum + (top - picked))
    if arguments.label_smoothing:
        loss += arguments.label_smoothing / classes * ((log_sum + top) * weight_sum - of_all)
    return loss.masked_fill_(target == arguments.ignore_index, 0.0), torch.stack((top, log_sum), 1)


@torch.no_grad()
def row_factors(target: Tensor, dloss: Tensor, arguments: LossArguments, classes: int) -> RowFactors:
    """What :func:`block_gradient_` needs of each row, from the gradient of its loss `dloss` (n,), fp32 or fp64."""
    dloss = dloss.masked_fill(target == arguments.ignore_index, 0.0)
    hit, weight_sum = _target_weights(target, arguments, classes, dloss.dtype)
    flat = dloss * (arguments.label_smoothing / classes) if arguments.label_smoothing else None
    return RowFactors(dloss * hit, flat, weight_sum)


@torch.no_grad()
def block_gradient_(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    factors: RowFactors,
    *,
    weight: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient (n, B) of a block of columns, in the dtype of the logits, written over them or into `out`.

    A row whose factors are 0 has the gradient 0, whatever its logits are.

    Args:
        logits: (n, B); the rows of what is written may not overlap.
        target: (n,) int64, counted from the block's first column; one outside of the block hits nothing.
        lse: (n, 2), the second result of :func:`row_losses`.
        weight: (B,) of the block's classes; read where the labels are smoothed.
    """
    out = logits if out is None else out
    if runs_triton(logits, lse, weight, out):
        import memopt.kernels.loss.function_triton as kernels

        kernels.launch_gradient(logits, target, lse, factors, weight, out)
    else:
        block_gradient(logits, target, lse, factors, weight, out)
    return out


def _target_weights(
    target: Tensor, arguments: LossArguments, classes: int, dtype: torch.dtype
) -> tuple[Tensor | float, Tensor | float]:
    """(1 - e) w_t of each row (of ignored rows any number), and the sum of all w."""
    if arguments.weight is None:
        return 1 - arguments.label_smoothing, float(classes)
    weight = arguments.weight.to(dtype)
    return (1 - arguments.label_smoothing) * weight[target.long().clamp(0, classes - 1)], weight.sum()


def lean_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy(logits.float(), ...)`` without the fp32 copy: backward holds the logits and one gradient.

    Stock keeps an fp32 log-softmax and makes an fp32 gradient before the one of the logits' dtype.

    Args:
        logits: (n, V), any floating dtype; they are saved, and not written to.
        target: (n,), int64 or uint8.

    Returns:
        fp32 (fp64 for fp64).
    """
    if torch.compiler.is_compiling():  # the compiler fuses the cast itself
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(
            wide, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    loss: Tensor = LeanCrossEntropyFunction.apply(logits, target, weight, label_smoothing, ignore_index)
    return reduced(loss, target, weight, ignore_index, reduction)


def reduced(loss: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: Reduction) -> Tensor:
    """The losses (n,) of rows as ``F.cross_entropy`` reduces them: "mean" is over the weights of the targets counted,
    NaN where there are none."""
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    counted = target != ignore_index
    if weight is None:
        return loss.sum() / counted.sum()
    weights = weight.to(loss.dtype)[target.long().masked_fill(~counted, 0)]
    return loss.sum() / weights.masked_fill(~counted, 0.0).sum()


class LeanCrossEntropyFunction(DirectFunction):
    """Keeps the logits in their own dtype."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, label_smoothing: float, ignore_index: int
    ) -> Tensor:
        ctx.options = {"label_smoothing": label_smoothing, "ignore_index": ignore_index}
        loss, lse = cross_entropy_rows(logits, target, weight=weight, **ctx.options)
        ctx.save_for_backward(logits, target, lse, weight)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        logits, target, lse, weight = ctx.saved_tensors
        if is_batched((dloss,)):
            with torch.enable_grad():
                losses = losses_of(logits, target, LossArguments(weight, **ctx.options))
            return *batched_gradients((losses,), (logits,), (dloss,)), None, None, None, None
        out = torch.empty_like(logits)
        cross_entropy_backward_(logits, target, lse, dloss, weight=weight, out=out, **ctx.options)
        return out, None, None, None, None
