"""Cross-entropy of a plain linear, by chunks of rows or by blocks of columns.

Chunks of rows: the forward also computes the gradients, in three products, or two for a frozen W.

    y = x_chunk W^T + b,  z = ops(y)         loss += sum of the chunk's losses,  dz over z
    dx_chunk = dy W,  dW += dy^T x_chunk,  db += sum over rows of dy             saves dx, dW and db, and no x

The loss must be one number: backward then only scales the gradients. On a GPU one kernel reads z for both loss and dz.
The gradient of W is summed in fp32 at least, or in W's own dtype on a GPU if there are at most `SUMMED` chunks.

Blocks of columns, a part of the vocabulary for all rows at a time, in four products:

    z = ops(x W_block^T + b_block)         elementwise, so that a block needs its own columns only
    forward     statistics of each row, block after block;  saves x and the statistics
    backward    z again, dz from the statistics;  dx += dz W_block,  dW_block = dz^T x,  db_block = sum over rows of dz

They need memory only for one block, dx in fp32 and the gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from memopt.kernels.base.autograd import (
    accumulation_dtype,
    as_leaf,
    autocast_as,
    batched_gradients,
    is_batched,
    refuse_double_backward,
)
from memopt.kernels.loss.function import (
    block_gradient_,
    fresh_statistics,
    in_range,
    row_factors,
    row_losses,
    statistics_,
)
from memopt.kernels.loss.reference import losses_of
from memopt.patches.loss.plain import Plain, add_product_, sums_of
from memopt.patches.loss.source import Source, run
from memopt.torch_compat import DirectFunction, is_checkpointed_region, without_foreign_hooks

_waiting: WeakKeyDictionary[nn.Module, weakref.ref[_Waits]] = WeakKeyDictionary()
"""Head -> what the backward of its last loss ends, if that keeps a gradient of the head's weight."""


def loss_at_once(plain: Plain, target: Tensor, factor: Tensor) -> Tensor:
    """`factor` (one element: 1 for a sum, 1 / divisor for a mean) times the sum of the losses of all rows, in fp32, or
    fp64 for fp64 logits. `target` is int64 (rows,)."""
    plain.source.check()
    x, weight, *others = plain.tensors
    # One autograd node for each tensor, W's last: its backward runs first and frees W's gradient before the others run.
    tensors = (x, *others, weight)
    with torch.no_grad(), autocast_as(None, plain.source.x):
        loss, gradients = _computed(plain, target, factor, tensors)
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if tensor is not None and gradient is not None:
            waits = _Waits()
            loss = _WithGradient.apply(loss, tensor, gradient.to(tensor.dtype), waits)
            if tensor is weight:
                _waiting[plain.source.head.module] = weakref.ref(waits)
    return loss


def gradient_waits(source: Source) -> bool:
    """Whether an earlier loss of this head keeps a gradient of the head's weight for its backward. Losses of chunks or
    of single rows would keep one each: more bytes than the logits have."""
    if is_checkpointed_region():  # both runs have to save the same tensors
        return False
    waits = _waiting.get(source.head.module)
    return waits is not None and waits() is not None


class _Waits:
    """Lives while a gradient waits for its backward. A reference to the gradient itself would not see it under hooks on
    saved tensors, which keep an alias."""


class _WithGradient(DirectFunction):
    """Returns the loss; its backward gives one more tensor a gradient that is already computed, times dloss."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, tensor: Tensor, gradient: Tensor, waits: _Waits) -> Tensor:
        ctx.save_for_backward(gradient)
        ctx.waits = waits
        return loss.data  # not a view: a user's program may add to the loss in place

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        (gradient,) = ctx.saved_tensors
        ctx.waits = None
        return dloss, gradient * dloss, None, None


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


def losses_by_blocks(plain: Plain, target: Tensor) -> Tensor:
    """The losses of all rows, not reduced: (rows,) in fp32, or fp64 for fp64 logits; 0 where the target (int64,
    (rows,)) is ignored."""
    plain.source.check()
    losses: Tensor = _BlocksFunction.apply(plain, target, plain.arguments.weight, *plain.tensors)
    return losses


class _BlocksFunction(DirectFunction):
    @staticmethod
    def forward(
        ctx: Any, plain: Plain, target: Tensor, class_weight: Tensor | None,
        x: Tensor, weight: Tensor, bias: Tensor | None, *others: Tensor,
    ) -> Tensor:  # fmt: skip
        rows, arguments, width = plain.rows(x), plain.arguments, plain.source.width
        in_range(target, arguments.ignore_index, width)
        statistics, smoothed = fresh_statistics(rows), bool(arguments.label_smoothing)
        with autocast_as(None, rows):
            for columns in plain.blocks(rows):
                matrix = plain.matrix(weight, columns)
                z = run(plain.source.operations, plain.logits(rows, matrix, bias, columns), columns)
                del matrix
                of_block = None if class_weight is None else class_weight[columns]
                statistics_(z, statistics, target - columns.start, weight=of_block, smoothed=smoothed)
                del z  # before the next block's is computed
        losses, lse = row_losses(statistics, target, arguments, width)
        ctx.plain = replace(plain, source=plain.source.without_rows)
        ctx.save_for_backward(target, class_weight, lse, x, weight, bias, *others)
        return losses

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        plain: Plain = ctx.plain
        plain.source.check()
        target, class_weight, lse, x, weight, bias, *others = ctx.saved_tensors
        if is_batched((dlosses,)):
            cut = plain.source.cut
            with torch.enable_grad(), without_foreign_hooks():
                leaf = as_leaf(x)
                losses = losses_of(cut.values(leaf), target, plain.arguments)
                inputs = (leaf, *replace(plain, source=cut).tensors[1:])
            return None, None, None, *batched_gradients((losses,), inputs, (dlosses,))
        rows, factors = plain.rows(x), row_factors(target, dlosses, plain.arguments, plain.source.width)
        needs_x, needs_weight, needs_bias, *needs_others = ctx.needs_input_grad[3:]
        dx = (torch.empty_like if len(rows) else torch.zeros_like)(rows, dtype=lse.dtype) if needs_x else None
        dweight = torch.empty_like(weight) if needs_weight else None
        dbias = torch.empty_like(bias) if needs_bias else None
        dothers = sums_of(others, needs_others)
        with autocast_as(None, rows):
            for columns in plain.blocks(rows):
                write = partial(
                    block_gradient_, target=target - columns.start, lse=lse, factors=factors,
                    weight=None if class_weight is None else class_weight[columns],
                )  # fmt: skip
                matrix = plain.matrix(weight, columns)
                dy = plain.gradient(rows, matrix, bias, columns, write, dothers)
                if dx is not None:
                    add_product_(dx, dy, matrix, first=not columns.start)
                if dweight is not None:
                    add_product_(plain.into(dweight, columns), dy.t(), rows, first=True)
                if dbias is not None:
                    dbias[columns] = dy.sum(0, dtype=accumulation_dtype(dy.dtype))
                del dy, matrix  # before the next are computed
        left_out = slice(plain.source.width, None)
        if dweight is not None:
            plain.into(dweight, left_out).zero_()
        if dbias is not None:
            dbias[left_out] = 0
        done = (None if total is None else total.to(other.dtype) for total, other in zip(dothers, others, strict=True))
        return None, None, None, None if dx is None else dx.to(x.dtype), dweight, dbias, *done
