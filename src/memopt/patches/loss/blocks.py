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
from memopt.kernels.loss.function import block_gradient_, block_statistics_, fresh_statistics, row_factors, row_losses
from memopt.kernels.loss.reference import losses_of
from memopt.patches.loss.plain import Plain, product, product_into, sums_of
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
        picked = torch.zeros_like(statistics[:, 0])
        with autocast_as(None, rows):
            for columns in plain.blocks(rows):
                z = plain.operated(plain.logits(rows, plain.matrix(weight, columns), bias, columns), columns)
                local = t - columns.start
                hit = z.gather(1, local.clamp(0, z.shape[1] - 1)[:, None])[:, 0].to(picked.dtype)
                picked = torch.where((local >= 0) & (local < z.shape[1]), hit, picked)
                of_block = None if class_weight is None else class_weight[columns]
                block_statistics_(z, statistics, weight=of_block, smoothed=smoothed)
        losses, lse = row_losses(statistics, picked, t, arguments, width)
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
        dx = torch.zeros_like(rows, dtype=lse.dtype) if needs_x else None
        dweight = torch.empty_like(weight) if needs_weight else None
        dbias = torch.empty_like(bias) if needs_bias else None
        dothers = sums_of(others, needs_others)
        wanted = [other for other, needed in zip(others, needs_others, strict=True) if needed]
        with autocast_as(None, rows):
            for columns in plain.blocks(rows):
                matrix = plain.matrix(weight, columns)
                y = plain.logits(rows, matrix, bias, columns)
                given = (t - columns.start, lse, factors)
                of_block = None if class_weight is None else class_weight[columns]
                if plain.source.operations:
                    y, z = plain.through_operations(y, columns)
                    # Out of place: an operation may have saved its result.
                    dz = block_gradient_(z.detach(), *given, weight=of_block, out=torch.empty_like(z))
                    dy, *found = torch.autograd.grad(z, (y, *wanted), dz, allow_unused=True)
                    for total, gradient in zip((each for each in dothers if each is not None), found, strict=True):
                        total += 0 if gradient is None else gradient
                else:
                    dy = block_gradient_(y, *given, weight=of_block)
                if dx is not None:
                    dx += product(dy, matrix, dx.dtype)
                if dweight is not None:
                    product_into(plain.into(dweight, columns), dy.t(), rows)
                if dbias is not None:
                    dbias[columns] = dy.sum(0, dtype=accumulation_dtype(dy.dtype))
        if dx is not None:
            dx = dx.to(x.dtype)
            dx = dx if kept is None else torch.zeros_like(x).index_copy_(0, kept, dx)
        done = (None if total is None else total.to(other.dtype) for total, other in zip(dothers, others, strict=True))
        return None, None, None, None, dx, dweight, dbias, *done


def _of(tensor: Tensor, kept: Tensor | None) -> Tensor:
    return tensor if kept is None else tensor[kept]


def in_range(target: Tensor, ignore_index: int, width: int) -> None:
    """An error for a target that is no class: on a GPU a device-side assertion, as the stock loss has it."""
    classes = torch.zeros(1, device=target.device).expand(width)
    classes[target.masked_fill(target == ignore_index, 0)]
