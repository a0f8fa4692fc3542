"""Cross-entropy of a plain linear by chunks of rows, its gradients in the same forward: 3 products, or 2 (frozen W).

    y = x_chunk W^T + b,  z = ops(y)         loss += sum of the chunk's losses,  dz over z
    dx_chunk = dy W,  dW += dy^T x_chunk,  db += sum over rows of dy             saves dx, dW and db, and no x

The loss must be one number: backward then only scales the gradients. On a GPU one kernel reads z for both loss and dz.
The gradient of W is summed in fp32 at least, or in W's own dtype on a GPU if there are at most `SUMMED` chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memopt.kernels.base.autograd import DirectFunction, autocast_as, refuse_double_backward
from memopt.kernels.loss.function import fresh_statistics, in_range, row_factors, row_losses, statistics_
from memopt.patches.loss.plain import Plain, add_product_, sums_of


def loss_at_once(plain: Plain, target: Tensor, factor: Tensor) -> Tensor:
    """`factor` times the sum of the losses of all rows, in fp32, or fp64 for fp64 logits.

    Args:
        target: (rows,) int64.
        factor: one element: 1 for a sum, 1 / divisor for a mean.
    """
    plain.source.check()
    x, weight, *others = plain.tensors
    # One autograd node for each tensor, W's last: its backward runs first and frees W's gradient before the others run.
    tensors = (x, *others, weight)
    with torch.no_grad(), autocast_as(None, plain.source.x):
        loss, gradients = _computed(plain, target, factor, tensors)
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if tensor is not None and gradient is not None:
            loss = _WithGradient.apply(loss, tensor, gradient.to(tensor.dtype))
    return loss


class _WithGradient(DirectFunction):
    """Returns the loss; its backward gives one more tensor a gradient that is already computed, times dloss."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, tensor: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss.data  # not a view: a user's program may add to the loss in place

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        (gradient,) = ctx.saved_tensors
        return dloss, gradient * dloss, None


def _computed(
    plain: Plain, target: Tensor, factor: Tensor, tensors: Sequence[Tensor | None]
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """The loss, and the gradient of each of `tensors` that needs one."""
    x, *_, weight = tensors
    assert x is not None
    assert weight is not None
    arguments, every = plain.arguments, slice(0, plain.source.width)
    needed = [tensor is not None and tensor.requires_grad for tensor in tensors]
    in_range(target, arguments.ignore_index, every.stop)
    rows, matrix = plain.rows(x), plain.matrix(weight, every)
    statistics = fresh_statistics(rows)
    factors = row_factors(target, factor.to(statistics.dtype).expand(len(rows)), arguments, every.stop)
    options: Any = {"weight": arguments.weight, "smoothed": bool(arguments.label_smoothing)}
    empty = torch.empty_like if len(rows) else torch.zeros_like
    dx = empty(rows) if needed[0] else None
    dweight = empty(weight, dtype=plain.sum_dtype(weight)) if needed[-1] else None
    sums = sums_of(tensors[1:-1], needed[1:-1])
    for part in plain.chunks(rows):
        write = partial(statistics_, statistics=statistics[part], target=target[part], factors=factors[part], **options)
        dy = plain.gradient(rows[part], matrix, tensors[1], every, write, sums[1:])
        if dx is not None:
            torch.mm(dy, matrix, out=dx[part])
        if dweight is not None:
            add_product_(plain.into(dweight, every), dy.t(), rows[part], first=not part.start)
        if sums[0] is not None:
            sums[0][every] += dy.sum(0, dtype=sums[0].dtype)
        del dy  # before the next chunk's is computed
    if dweight is not None:
        plain.into(dweight, slice(every.stop, None)).zero_()  # columns that an operation left out
    losses, _ = row_losses(statistics, target, arguments, every.stop)
    return losses.sum() * factor, (dx, *sums, dweight)
