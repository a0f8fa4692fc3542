"""Cross-entropy by rows: loss and statistics in one read of the logits, their gradient in one read and one write.

`memopt.kernels.loss.reference` has the formulas. The operators know nothing of autograd; :func:`lean_cross_entropy`
does, for logits that are kept whole.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.kernels.base.autograd import DirectFunction, autocast_as, refuse_double_backward
from memopt.kernels.base.device import runs_triton
from memopt.kernels.loss.reference import LossArguments, rows_gradient, rows_loss

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
        sum is the logsumexp. (One number would lose digits that stock keeps.) Both fp32; fp64 for fp64. The second is
        unspecified in ignored rows.

    Raises:
        IndexError: a target is neither a class nor `ignore_index`; on a GPU a device-side assertion fails.
    """
    arguments = LossArguments(weight, label_smoothing, ignore_index)
    with autocast_as(None, logits):  # autocast gives nll_loss an fp32 copy of all logits
        # The stock operator picks the target's logit, and refuses a target out of range as it always does.
        picked = F.nll_loss(logits, target, reduction="none", ignore_index=ignore_index)
        if runs_triton(logits, weight):
            import memopt.kernels.loss.function_triton as kernels

            return kernels.launch_loss(logits, target, picked, arguments)
        return rows_loss(logits, target, picked, arguments)


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
    out = logits if out is None else out
    arguments = LossArguments(weight, label_smoothing, ignore_index)
    if runs_triton(logits, weight, dloss, out):
        import memopt.kernels.loss.function_triton as kernels

        return kernels.launch_gradient(logits, target, lse, dloss, arguments, out)
    return rows_gradient(logits, target, lse, dloss, arguments, out)


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
        out = torch.empty_like(logits)
        cross_entropy_backward_(logits, target, lse, dloss, weight=weight, out=out, **ctx.options)
        return out, None, None, None, None
