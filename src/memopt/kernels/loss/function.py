"""Cross-entropy of rows: statistics in one read of the logits, their gradient in one read and one write.

By blocks of columns, or one block of all columns: fresh_statistics, statistics_ for each block, row_losses; then
row_factors, block_gradient_ for each block. These record no graph; :func:`lean_cross_entropy`, for whole logits, does.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.kernels.base.autograd import (
    accumulation_dtype,
    autocast_as,
    batched_gradients,
    is_batched,
    refuse_double_backward,
)
from memopt.kernels.base.device import runs_triton
from memopt.kernels.loss.reference import LossArguments, RowFactors, block_gradient, losses_of, update_statistics
from memopt.torch_compat import DirectFunction

Reduction = Literal["none", "mean", "sum"]


def in_range(target: Tensor, ignore_index: int, classes: int) -> None:
    """Raises the stock operator's IndexError for a target that is no class; on a GPU a device-side assertion."""
    nothing = torch.zeros((1, 1), device=target.device).expand(len(target), classes)
    F.nll_loss(nothing, target, reduction="none", ignore_index=ignore_index)


def fresh_statistics(rows: Tensor) -> Tensor:
    """Initial statistics (n, 4) for `rows` (n, ...), before the first block of columns (:func:`statistics_`)."""
    statistics = rows.new_zeros(len(rows), 4, dtype=accumulation_dtype(rows.dtype))
    statistics[:, 0] = -torch.inf
    return statistics


@torch.no_grad()
def statistics_(
    logits: Tensor, statistics: Tensor, target: Tensor, *, weight: Tensor | None = None, smoothed: bool = False,
    factors: RowFactors | None = None, out: Tensor | None = None,
) -> None:  # fmt: skip
    """Adds a block of columns to the statistics of its rows, in place.

    Args:
        logits: (n, B), any floating dtype and strides.
        statistics: (n, 4) contiguous: maximum, sum of exp(x - maximum), where `smoothed` sum of weight * x, and the
            logit of the target.
        target: (n,) int64, counted from the block's first column; one outside of the block picks nothing.
        weight: (B,) of the block's classes; read where `smoothed`.
        factors, out: only for a block of all columns: also writes the gradient, as :func:`block_gradient_`, to `out`,
            which may be `logits`.
    """
    if runs_triton(logits, statistics, weight, out):
        import memopt.kernels.loss.function_triton as kernels

        kernels.launch_statistics(logits, statistics, weight, smoothed, target, factors, out)
        return
    update_statistics(logits, statistics, weight, smoothed, target)
    if factors is not None and out is not None:
        lse = torch.stack((statistics[:, 0], statistics[:, 1].log()), 1)
        block_gradient(logits, target, lse, factors, weight, out)


@torch.no_grad()
def row_losses(statistics: Tensor, target: Tensor, arguments: LossArguments, classes: int) -> tuple[Tensor, Tensor]:
    """The loss (n,) of each row, 0 if it is ignored, and its pair m, log s (n, 2), of the dtype of `statistics`.

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
    """The factors of each row for :func:`block_gradient_`, from the gradient of its loss `dloss` (n,), fp32 or fp64."""
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
    """(1 - e) w_t of each row (any number for ignored rows), and the sum of all w."""
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
    return loss.sum() / weight_of_all(target, LossArguments(weight, 0.0, ignore_index), loss.dtype)


def weight_of_all(target: Tensor, arguments: LossArguments, dtype: torch.dtype) -> Tensor:
    """The divisor of a mean, a tensor of one number: the count, or the sum of class weights, of targets not ignored."""
    kept = target != arguments.ignore_index
    if arguments.weight is None:
        return kept.sum().to(dtype)
    weights = arguments.weight.to(dtype)[target.long().masked_fill(~kept, 0)]
    return weights.masked_fill(~kept, 0.0).sum()


class LeanCrossEntropyFunction(DirectFunction):
    """Saves the logits in their own dtype."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, label_smoothing: float, ignore_index: int
    ) -> Tensor:
        ctx.options = {"label_smoothing": label_smoothing, "ignore_index": ignore_index}
        in_range(target, ignore_index, logits.size(1))
        statistics, target = fresh_statistics(logits), target.long()
        with autocast_as(None, logits):
            statistics_(logits, statistics, target, weight=weight, smoothed=bool(label_smoothing))
            loss, lse = row_losses(statistics, target, LossArguments(weight, **ctx.options), logits.size(1))
        ctx.save_for_backward(logits, target, lse, weight)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        logits, target, lse, weight = ctx.saved_tensors
        arguments = LossArguments(weight, **ctx.options)
        if is_batched((dloss,)):
            with torch.enable_grad():
                losses = losses_of(logits, target, arguments)
            return *batched_gradients((losses,), (logits,), (dloss,)), None, None, None, None
        factors, out = row_factors(target, dloss, arguments, logits.size(1)), torch.empty_like(logits)
        return block_gradient_(logits, target, lse, factors, weight=weight, out=out), None, None, None, None
