"""The losses of a plain linear's rows by blocks of its columns: a part of the vocabulary for all rows at a time.

    z = ops(x W_block^T + b_block)         elementwise, so that a block needs its own columns only
    forward     statistics of each row, block after block;  saves x and the statistics
    backward    z again, dz from the statistics;  dx += dz W_block,  dW_block = dz^T x,  db_block = sum over rows of dz

Four products instead of three, and no memory but a block, dx in fp32 and the gradients themselves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memopt.kernels.base.autograd import (
    DirectFunction,
    autocast_as,
    batched_gradients,
    is_batched,
    refuse_double_backward,
)
from memopt.kernels.base.precision import accumulation_dtype
from memopt.kernels.loss.function import (
    block_gradient_,
    block_statistics_,
    fresh_statistics,
    in_range,
    row_factors,
    row_losses,
)
from memopt.kernels.loss.reference import losses_of
from memopt.patches.loss.plain import Plain, add_product_, place_of, sums_of
from memopt.patches.loss.rows import itself


def losses_by_blocks(plain: Plain, target: Tensor, kept: Tensor | None) -> Tensor:
    """The losses of all rows, not reduced: (rows,) in fp32, or fp64 for fp64 logits; 0 where the target is ignored.

    Args:
        target: (rows,) int64.
        kept: indices of the rows that count; None for all.
    """
    plain.source.check()
    losses: Tensor = _BlocksFunction.apply(plain, target, kept, plain.arguments.weight, *plain.tensors)
    return losses


class _BlocksFunction(DirectFunction):
    @staticmethod
    def forward(
        ctx: Any, plain: Plain, target: Tensor, kept: Tensor | None, class_weight: Tensor | None,
        x: Tensor, weight: Tensor, bias: Tensor | None, *others: Tensor,
    ) -> Tensor:  # fmt: skip
        rows, t, arguments, width = plain.rows(x, kept), _of(target, kept), plain.arguments, plain.source.width
        in_range(t, arguments.ignore_index, width)
        statistics, smoothed = fresh_statistics(rows), bool(arguments.label_smoothing)
        with autocast_as(None, rows):
            for columns in plain.blocks(rows):
                z = plain.operated(plain.logits(rows, plain.matrix(weight, columns), bias, columns), columns)
                of_block = None if class_weight is None else class_weight[columns]
                block_statistics_(z, statistics, t - columns.start, weight=of_block, smoothed=smoothed)
                del z  # before the next is computed
        losses, lse = row_losses(statistics, t, arguments, width)
        ctx.plain = replace(plain, source=plain.source.without_rows)
        ctx.save_for_backward(target, kept, class_weight, lse, x, weight, bias, *others)
        return losses if kept is None else losses.new_zeros(len(target)).index_copy_(0, kept, losses)

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        plain: Plain = ctx.plain
        plain.source.check()
        target, kept, class_weight, lse, x, weight, bias, *others = ctx.saved_tensors
        if is_batched((dlosses,)):
            with torch.enable_grad(), saved_tensors_hooks(itself, itself):
                losses, inputs = losses_of(plain.source.values(x), target, plain.arguments), (x, *plain.tensors[1:])
            return None, None, None, None, *batched_gradients((losses,), inputs, (dlosses,))
        rows, t = plain.rows(x, kept), _of(target, kept)
        factors = row_factors(t, _of(dlosses, kept), plain.arguments, plain.source.width)
        needs_x, needs_weight, needs_bias, *needs_others = ctx.needs_input_grad[4:]
        dx = (torch.empty_like if len(rows) else torch.zeros_like)(rows, dtype=lse.dtype) if needs_x else None
        dweight = torch.empty_like(weight) if needs_weight else None
        dbias = torch.empty_like(bias) if needs_bias else None
        dothers = sums_of(others, needs_others)
        wanted = [other for other, needed in zip(others, needs_others, strict=True) if needed]

        def take(columns: slice) -> None:  # a function: nothing of a block lives while the next is computed
            matrix = plain.matrix(weight, columns)
            y, z = plain.through_operations(plain.logits(rows, matrix, bias, columns), columns)
            of_block, local = None if class_weight is None else class_weight[columns], t - columns.start
            dz = block_gradient_(z.detach(), local, lse, factors, weight=of_block, out=place_of(y, z))
            dy = plain.before_operations(y, z, dz, wanted, dothers)
            if dx is not None:
                add_product_(dx, dy, matrix, first=not columns.start)
            if dweight is not None:
                add_product_(plain.into(dweight, columns), dy.t(), rows, first=True)
            if dbias is not None:
                dbias[columns] = dy.sum(0, dtype=accumulation_dtype(dy.dtype))

        with autocast_as(None, rows):
            for columns in plain.blocks(rows):
                take(columns)
        of_x = None if dx is None else dx.to(x.dtype)
        if of_x is not None and kept is not None:
            of_x = torch.zeros_like(x).index_copy_(0, kept, of_x)
        done = (None if total is None else total.to(other.dtype) for total, other in zip(dothers, others, strict=True))
        return None, None, None, None, of_x, dweight, dbias, *done


def _of(tensor: Tensor, kept: Tensor | None) -> Tensor:
    return tensor if kept is None else tensor[kept]
