"""The cross-entropy of a plain linear, by blocks of its columns: a part of the vocabulary for all rows at a time.

    z = x W^T + b,  z' = ops(z)                           elementwise, so that a block needs its own columns only
    forward     lse = log sum_c exp z'_c, block after block (Milakov, Gimelshein 2018),  saves x and lse
                loss = (1 - e) w_t (lse - z'_t) + e/V sum_c w_c (lse - z'_c)       t the target, e the label smoothing
    backward    z' again;  dz'_c = dloss (((1 - e) w_t + e/V sum w) exp(z'_c - lse) - (1 - e) w_t [c = t] - e/V w_c)
                dx += dz W_block,   dW_block = dz^T x,   db_block = sum over rows of dz

That is four products instead of three, and no memory but a block, x's gradient in fp32 and the gradients themselves:
with blocks of rows a gradient of W in 16 bits would need a sum in fp32, twice its size. Gradients made in the forward
would save a product, and hold dW while the whole model's activations are alive, once more when it is scaled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memopt.kernels.base.autograd import DirectFunction, autocast_as, refuse_double_backward
from memopt.kernels.base.precision import accumulation_dtype
from memopt.patches.loss.lazy import Source
from memopt.patches.loss.rows import LOGIT_BYTES, chunk_bytes, itself


@dataclass(frozen=True, eq=False)
class Rules:
    """Of a cross-entropy, with the meaning that `torch.nn.functional.cross_entropy` gives them."""

    weight: Tensor | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0

    def losses(self, logits: Tensor, target: Tensor) -> tuple[Tensor]:
        """Of rows, not reduced, in fp32 at least; `target` are classes, or their probabilities (rows, V)."""
        dtype = accumulation_dtype(logits.dtype)
        weight = None if self.weight is None else self.weight.to(dtype)
        with autocast_as(None, logits):
            each = F.cross_entropy(
                logits.to(dtype),
                target.to(dtype) if target.is_floating_point() else target,
                weight,
                ignore_index=self.ignore_index,
                reduction="none",
                label_smoothing=self.label_smoothing,
            )
        return (each,)


def runs_by_blocks(source: Source) -> bool:
    """Whether the head is a plain linear and nothing since has mixed columns."""
    return source.head.transposed is not None and all(operation.by_column for operation in source.operations)


def by_blocks(source: Source, target: Tensor, kept: Tensor | None, rules: Rules) -> Tensor:
    """The losses of all rows, not reduced: (rows,) in fp32, or fp64 for fp64 logits; 0 where the target is ignored.

    Args:
        source: what the logits (rows, V) are computed from.
        target: (rows,) int64.
        kept: indices of the rows that count; None for all.
    """
    source.check()
    parameters = source.head.module._parameters
    others = [tensor for operation in source.operations for tensor in operation.tensors]
    tensors = (source.x, parameters["weight"], parameters.get("bias"), *others)
    if not (source.tracked and torch.is_grad_enabled()):
        tensors = tuple(None if tensor is None else tensor.detach() for tensor in tensors)
    losses: Tensor = _BlocksFunction.apply(_Plan(source, rules), target, kept, rules.weight, *tensors)
    return losses


@dataclass(frozen=True, eq=False)
class _Plan:
    source: Source
    rules: Rules

    def blocks(self, rows: int) -> Iterator[slice]:
        """Slices of the columns; a block of them is as large as a chunk may be."""
        width = self.source.width
        columns = chunk_bytes(self.source.x) // (LOGIT_BYTES * max(1, rows)) // 64 * 64
        for first in range(0, width, max(64, columns)):
            yield slice(first, min(first + max(64, columns), width))

    def matrix(self, weight: Tensor, columns: slice) -> Tensor:
        """(columns, in), in the dtype of the product."""
        block = weight[:, columns].t() if self.source.head.transposed else weight[columns]
        return block.to(self.source.head.autocast or weight.dtype)

    def product(self, rows: Tensor, matrix: Tensor, bias: Tensor | None, columns: slice) -> Tensor:
        return F.linear(rows, matrix, None if bias is None else bias[columns].to(matrix.dtype))

    def operated(self, y: Tensor, columns: slice) -> Tensor:
        for operation in self.source.operations:
            y = operation.run(y, columns)
        return y


class _BlocksFunction(DirectFunction):
    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, target: Tensor, kept: Tensor | None, class_weight: Tensor | None,
        x: Tensor, weight: Tensor, bias: Tensor | None, *others: Tensor,
    ) -> Tensor:  # fmt: skip
        rows, t, valid = _chosen(plan, x, target, kept)
        smoothing, width = plan.rules.label_smoothing, plan.source.width
        dtype = accumulation_dtype(rows.dtype)
        maximum = torch.full((len(rows),), -torch.inf, dtype=dtype, device=x.device)
        total, hit, flat = (torch.zeros_like(maximum) for _ in range(3))
        with autocast_as(None, rows):
            for columns in plan.blocks(len(rows)):
                z = plan.operated(plan.product(rows, plan.matrix(weight, columns), bias, columns), columns)
                inside = (t >= columns.start) & (t < columns.stop)
                local = (t - columns.start).clamp(0, z.shape[1] - 1)
                hit += z.gather(1, local[:, None])[:, 0].to(dtype).masked_fill_(~inside, 0)
                if smoothing:
                    each = 1.0 if class_weight is None else class_weight[columns].to(dtype)
                    flat += (z.to(dtype) * each).sum(1)
                block_statistics_(z, maximum, total)
            log_total = total.log()
            own, all_weights = _weights(class_weight, t, width, dtype)
            losses = (1 - smoothing) * own * (maximum - hit + log_total)
            if smoothing:
                losses += smoothing / width * (all_weights * (maximum + log_total) - flat)
        ctx.plan = plan
        ctx.save_for_backward(target, kept, class_weight, maximum, log_total, x, weight, bias, *others)
        losses.masked_fill_(~valid, 0)
        return losses if kept is None else losses.new_zeros(len(target)).index_copy_(0, kept, losses)

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        plan: _Plan = ctx.plan
        plan.source.check()
        target, kept, class_weight, maximum, log_total, x, weight, bias, *others = ctx.saved_tensors
        rows, t, valid = _chosen(plan, x, target, kept)
        dlosses = (dlosses if kept is None else dlosses[kept]).masked_fill(~valid, 0)
        smoothing, width = plan.rules.label_smoothing, plan.source.width
        own, all_weights = _weights(class_weight, t, width, maximum.dtype)
        hit = dlosses * (1 - smoothing) * own
        flat = dlosses * (smoothing / width) if smoothing else None
        softmax = hit if flat is None else hit + flat * all_weights

        needs_x, needs_weight, needs_bias, *needs_others = ctx.needs_input_grad[4:]
        dx = torch.zeros_like(rows, dtype=maximum.dtype) if needs_x else None
        dweight = torch.empty_like(weight) if needs_weight else None
        dbias = torch.empty_like(bias) if needs_bias else None
        wanted = [tensor for tensor, needed in zip(others, needs_others, strict=True) if needed]
        dothers = [torch.zeros_like(tensor, dtype=accumulation_dtype(tensor.dtype)) for tensor in wanted]
        with autocast_as(None, rows):
            for columns in plan.blocks(len(rows)):
                matrix = plan.matrix(weight, columns)
                y = plan.product(rows, matrix, bias, columns)
                weights = None if class_weight is None else class_weight[columns]
                factors = (maximum, log_total, t - columns.start, softmax, hit, flat, weights)
                if plan.source.operations:
                    dy, *found = _through_operations(plan, y, columns, factors, wanted)
                    for total, gradient in zip(dothers, found, strict=True):
                        total += 0 if gradient is None else gradient
                else:
                    dy = block_gradient_(y, *factors)
                if dx is not None:
                    dx += product(dy, matrix, dx.dtype)
                if dweight is not None:
                    into = dweight[:, columns].t() if plan.source.head.transposed else dweight[columns]
                    into.copy_(product(dy.t(), rows, dweight.dtype))
                if dbias is not None:
                    dbias[columns] = dy.sum(0, dtype=maximum.dtype)
        if dx is not None:
            dx = dx.to(x.dtype) if kept is None else torch.zeros_like(x).index_copy_(0, kept, dx.to(x.dtype))
        rest = iter(total.to(tensor.dtype) for total, tensor in zip(dothers, wanted, strict=True))
        return None, None, None, None, dx, dweight, dbias, *(next(rest) if needed else None for needed in needs_others)


def _through_operations(
    plan: _Plan, y: Tensor, columns: slice, factors: tuple[Any, ...], wanted: list[Tensor]
) -> tuple[Tensor, ...]:
    """Gradients of the head's own output and of the tensors that operations read."""
    with torch.enable_grad(), saved_tensors_hooks(itself, itself):
        y.requires_grad_()
        z = plan.operated(y, columns)
    dz = block_gradient_(z.detach().clone(), *factors)  # an operation may have saved its own result
    return torch.autograd.grad(z, (y, *wanted), dz, allow_unused=True)


def _chosen(plan: _Plan, x: Tensor, target: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The rows that count in the dtype of the product, their targets, and which of those are not ignored."""
    rows = (x if kept is None else x[kept]).to(plan.source.head.autocast or x.dtype)
    t = target if kept is None else target[kept]
    valid = t != plan.rules.ignore_index
    return rows, t.masked_fill(~valid, 0), valid


def _weights(class_weight: Tensor | None, t: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | float]:
    """The weights of the targets' classes, and the sum of all; an error for a target that is no class."""
    each = torch.ones(1, dtype=dtype, device=t.device).expand(width) if class_weight is None else class_weight.to(dtype)
    return each[t], float(width) if class_weight is None else each.sum()


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a @ b`` in `dtype`, rounded once."""
    if a.dtype == dtype:
        return a.mm(b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype).mm(b.to(dtype))


def block_statistics_(logits: Tensor, maximum: Tensor, total: Tensor) -> None:
    """Take a block into the running maximum and sum of exponentials of each row, in place.

    Args:
        logits: (rows, columns).
        maximum: (rows,) in fp32 or fp64; -inf at first.
        total: (rows,) likewise, sum of exp(logit - maximum); 0 at first.
    """
    wide = logits.to(maximum.dtype)
    top = torch.maximum(maximum, wide.amax(1))
    base = top.masked_fill(top == -torch.inf, 0)  # nothing but -inf so far: its exponentials are 0, not NaN
    total.mul_((maximum - base).exp_()).add_((wide - base[:, None]).exp_().sum(1))
    maximum.copy_(top)


def block_gradient_(
    logits: Tensor, maximum: Tensor, log_total: Tensor, target: Tensor, softmax: Tensor, hit: Tensor,
    flat: Tensor | None, weight: Tensor | None,
) -> Tensor:  # fmt: skip
    """softmax exp(logits - maximum - log_total) - hit [column = target] - flat weight, written over the logits.

    Args:
        logits: (rows, columns) of a block.
        maximum, log_total: (rows,) of all columns, in fp32 or fp64. Their sum is the logsumexp; it would lose digits.
        target: (rows,), counted from the block's first column; what is outside of it hits nothing.
        softmax, hit, flat: (rows,) factors of the same dtype; no `flat` is 0.
        weight: (columns,) of the classes; None for ones.
    """
    wide = (logits.to(maximum.dtype) - maximum[:, None]).sub_(log_total[:, None]).exp_().mul_(softmax[:, None])
    if flat is not None:
        wide -= flat[:, None] if weight is None else torch.outer(flat, weight.to(flat.dtype))
    inside = (target >= 0) & (target < logits.shape[1])
    wide.scatter_add_(1, target.clamp(0, logits.shape[1] - 1)[:, None], -(hit * inside)[:, None])
    return logits.copy_(wide)
