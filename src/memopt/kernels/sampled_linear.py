"""A linear whose weight gradient is estimated from a sample of the rows of its input.

    forward     y = x W^T + b, by the stock module itself
    backward    dx = dy W,   db = sum over rows of dy, both exact
                dW = sum_j weight_j dy[row_j]^T x[row_j], if its slot holds a sample; else dy^T x, exact

With the samplers of `memopt.kernels.sampling` the expectation of dW is the exact one. The input is kept in a slot that
may exchange it for its rows (`memopt.saved.sampled`). After WTA-CRS (https://arxiv.org/abs/2305.15265), which scales
rows of x; here the few rows of dy are scaled, in fp32, so that rows of x are kept as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from memopt.kernels.autograd import autocast_as, autocast_dtype, refuse_double_backward
from memopt.kernels.linear import weight_gradient
from memopt.kernels.sampled_rows import row_norms, sampled_weight_gradient


class Unpacked(Protocol):
    """A tensor that is kept for backward."""

    def unpack(self) -> Tensor: ...


class RowSample(Protocol):
    """Rows of an input that stand for all."""

    rows: Unpacked
    weights: Unpacked


class Slot(Protocol):
    """Where the input is kept."""

    sample: RowSample | None


#: Told the norms of the output gradient's rows, fp32 (n,).
Report = Callable[[Tensor], None]


class SampledLinearFunction(torch.autograd.Function):
    """Keeps x, or rows of it, and the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transposed: bool,
        stock: Callable[[Tensor], Tensor],
        slot: Slot,
        report: Report | None,
    ) -> Tensor:
        """`stock(x)`, which is x W^T + b; with `transposed` the weight is (in, out)."""
        ctx.transposed, ctx.report = transposed, report
        # Autograd owns the slot, and lets it go after backward, however long the graph stays.
        ctx.slot = weakref.ref(slot)
        ctx.shape, ctx.dtype, ctx.compute = x.shape, x.dtype, autocast_dtype(x) or x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight)
        return stock(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        kept, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        dx = dweight = dbias = None
        with autocast_as(None, dy):
            rows = dy.reshape(-1, dy.size(-1))
            if needs[0]:
                matrix = weight.to(ctx.compute)
                dx = (rows @ (matrix.t() if ctx.transposed else matrix)).view(ctx.shape).to(ctx.dtype)
            if needs[1]:
                dweight = _dweight(ctx.slot().sample, rows, kept, weight, ctx.transposed, ctx.compute)
            if needs[2]:
                dbias = rows.sum(0).to(ctx.bias_dtype)
            if ctx.report is not None:
                ctx.report(row_norms(rows))
        return dx, dweight, dbias, None, None, None, None


def _dweight(
    sample: RowSample | None, dy: Tensor, kept: Tensor, weight: Tensor, transposed: bool, compute: torch.dtype
) -> Tensor:
    x = kept.reshape(-1, kept.size(-1)).to(compute)
    if sample is None:
        gradient = weight_gradient(dy, x, weight.t() if transposed else weight)
    else:
        gradient = sampled_weight_gradient(dy, x, sample.rows.unpack(), sample.weights.unpack())
    return (gradient.t() if transposed else gradient).to(weight.dtype)
