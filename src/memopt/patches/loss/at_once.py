"""The loss of a plain linear by chunks of its rows, its gradients made in the forward: three products, or two.

    y = x_chunk W^T + b,  z = ops(y)         loss += sum of the chunk's losses,  dz over z
    dx_chunk = dy W,  dW += dy^T x_chunk,  db += sum over rows of dy             saves dx, dW and db, and no x

For a loss that is one number, of which the backward is a scale. W's gradient is summed in fp32 at least.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memopt.kernels.base.autograd import DirectFunction, autocast_as, refuse_double_backward
from memopt.kernels.base.precision import accumulation_dtype
from memopt.kernels.loss.function import cross_entropy_backward_, cross_entropy_rows
from memopt.patches.loss.plain import Plain, product, sums_of


def loss_at_once(plain: Plain, target: Tensor, kept: Tensor | None, factor: Tensor) -> Tensor:
    """`factor` times the sum of the losses of all rows, in fp32, or fp64 for fp64 logits.

    Args:
        target: (rows,) int64.
        kept: indices of the rows that count; None for all.
        factor: of one element: 1 for a sum.
    """
    plain.source.check()
    loss: Tensor = _AtOnceFunction.apply(plain, target, kept, factor, *plain.tensors)
    return loss


class _AtOnceFunction(DirectFunction):
    @staticmethod
    def forward(
        ctx: Any, plain: Plain, target: Tensor, kept: Tensor | None, factor: Tensor,
        x: Tensor, weight: Tensor, bias: Tensor | None, *others: Tensor,
    ) -> Tensor:  # fmt: skip
        needed = ctx.needs_input_grad[4:]
        dx = torch.zeros_like(x) if needed[0] else None
        sums = sums_of((weight, bias, *others), needed[1:])
        wanted = [other for other, need in zip(others, needed[3:], strict=True) if need]
        every, options = slice(0, plain.source.width), vars(plain.arguments)
        matrix = plain.matrix(weight, every)
        chosen, t = plain.rows(x, kept), target if kept is None else target[kept]
        loss = torch.zeros((), dtype=accumulation_dtype(chosen.dtype), device=x.device)
        with autocast_as(None, chosen):
            for part in plain.chunks(chosen):
                rows = chosen[part]
                y = plain.logits(rows, matrix, bias, every)
                if plain.source.operations:
                    y, z = plain.through_operations(y, every)
                else:
                    z = y
                losses, lse = cross_entropy_rows(z.detach(), t[part], **options)
                loss += losses.sum()
                if not any(needed):
                    continue
                given = (z.detach(), t[part], lse, factor.expand(len(rows)))
                if plain.source.operations:
                    # Out of place: an operation may have saved its result.
                    dz = cross_entropy_backward_(*given, **options, out=torch.empty_like(z))
                    dy, *found = torch.autograd.grad(z, (y, *wanted), dz, allow_unused=True)
                    for total, gradient in zip((each for each in sums[2:] if each is not None), found, strict=True):
                        total += 0 if gradient is None else gradient
                else:
                    dy = cross_entropy_backward_(*given, **options)
                if dx is not None:
                    gradient = dy.mm(matrix).to(dx.dtype)
                    if kept is None:
                        dx[part] = gradient
                    else:
                        dx.index_copy_(0, kept[part], gradient)
                _add_weight_gradient(plain, sums[0], dy, rows)
                if sums[1] is not None:
                    sums[1] += dy.sum(0, dtype=sums[1].dtype)
        pairs = zip(sums, (weight, bias, *others), strict=True)
        gradients = [total if total is None or tensor is None else total.to(tensor.dtype) for total, tensor in pairs]
        ctx.save_for_backward(dx, *gradients)
        return loss * factor

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        return None, None, None, None, *(None if each is None else each * dloss for each in ctx.saved_tensors)


def _add_weight_gradient(plain: Plain, total: Tensor | None, dy: Tensor, rows: Tensor) -> None:
    if total is None:
        return
    if total.dtype == dy.dtype:
        plain.into(total, slice(0, plain.source.width)).addmm_(dy.t(), rows)
        return
    for columns in plain.blocks(rows):  # a product in another dtype is a tensor of its own
        plain.into(total, columns).add_(product(dy[:, columns].t(), rows, total.dtype))
