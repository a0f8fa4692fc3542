"""A linear whose weight gradient is estimated from a sample of the rows of its input.

    forward     y = x W^T + b, by the stock module itself
    backward    dx = dy W,   db = sum over rows of dy, both exact
                dW = sum_j weight_j dy[row_j]^T x[row_j], if its slot holds a sample; else dy^T x, exact

With the samplers of `memopt.kernels.sampled_linear.sampling` the expectation of dW is the exact one. The input is saved
in a slot that may replace it by a sample of its rows (`memopt.patches.sampled_linear.slot`). After WTA-CRS
(https://arxiv.org/abs/2305.15265), which scales rows of x; here rows of x are saved unscaled, and the few rows of dy
are scaled, in fp32. The operations on rows are below the function:

    norm_i = |x_i|                                   the score of row i, or a factor of it
    kept_j = x[row_j]
    dW     = sum_j weight_j * dy[row_j]^T kept_j
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from memopt.kernels.base.autograd import (
    accumulation_dtype,
    autocast_as,
    autocast_dtype,
    not_a_view,
    refuse_double_backward,
)
from memopt.kernels.base.device import runs_triton
from memopt.kernels.linear.function import weight_gradient


class Unpacked(Protocol):
    """A tensor that is saved for backward."""

    def unpack(self) -> Tensor: ...


class RowSample(Protocol):
    """A sample of an input's rows, and their weights."""

    rows: Unpacked
    weights: Unpacked


#: Called with the norms of the output gradient's rows, fp32 (n,).
Report = Callable[[Tensor], None]


class SampleSlot(Protocol):
    """The slot in which the input or its sample is saved."""

    sample: RowSample | None
    dtype: torch.dtype | None
    report: Report | None


class SampledLinearFunction(torch.autograd.Function):
    """Saves x, or rows of it, and the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transposed: bool,
        stock: Callable[[Tensor], Tensor],
        slot: SampleSlot,
        report: Report | None,
    ) -> Tensor:
        """`stock(x)`, which is x W^T + b; with `transposed` the weight is (in, out)."""
        ctx.transposed = transposed
        # Autograd owns the slot and frees it after backward; a strong reference would keep it as long as the graph.
        ctx.slot = weakref.ref(slot)
        autocast = None if x.dtype == torch.float64 else autocast_dtype(x)  # fp64 is not cast
        ctx.shape, ctx.dtype, ctx.compute = x.shape, x.dtype, autocast or x.dtype
        slot.dtype, slot.report = ctx.compute, report
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight)
        # Without autocast's cache: in older PyTorch (issue 158232) a cast in an autograd function has no graph. A later
        # reader of the weight in the same region would take it from the cache and give the weight no gradient.
        with autocast_as(autocast_dtype(x), x):
            return not_a_view(stock(x))

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
            report = ctx.slot().report
            if report is not None:
                report(row_norms(rows))
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


def row_norms(x: Tensor) -> Tensor:
    """|x_i| of each row, fp32 (n,); fp64 for fp64.

    No square of a 16-bit or fp32 number overflows or underflows: only a row of zeros has norm 0, and only a norm beyond
    fp32 is infinite. NaN and infinity propagate. Triton reads x once and copies nothing.

    Args:
        x: (n, d), floating, any strides.
    """
    x = x.detach()
    if runs_triton(x):
        from memopt.kernels.sampled_linear.rows_triton import launch_row_norms

        return launch_row_norms(x)
    return _row_norms(x)


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], contiguous, in the dtype of x: (k, d).

    Args:
        x: (n, d), any strides.
        rows: int32 (k,), each in [0, n).
    """
    x = x.detach()
    if runs_triton(x):
        from memopt.kernels.sampled_linear.rows_triton import launch_gather_rows

        return launch_gather_rows(x, rows)
    return x.index_select(0, rows)


def sampled_weight_gradient(dy: Tensor, kept: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """sum_j weights_j * dy[rows_j]^T kept_j, (out, in) in the dtype of `kept`.

    weights_j * dy[rows_j] is computed in fp32 (fp64 for fp64) and rounded once to the dtype of `kept`; the sum over the
    rows is accumulated in fp32 (fp64). Triton reads the k rows of dy in place; the reference copies them.

    Args:
        dy: (n, out), any strides.
        kept: (k, in), any strides.
        rows: int32 (k,), each in [0, n).
        weights: fp32 (k,).
    """
    dy, kept = dy.detach(), kept.detach()
    if runs_triton(dy, kept, weights) and _kernel_fits(kept.device):
        from memopt.kernels.sampled_linear.rows_triton import launch_weight_gradient

        return launch_weight_gradient(dy, kept, rows, weights)
    return _weight_gradient(dy, kept, rows, weights)


@functools.cache
def _kernel_fits(device: torch.device) -> bool:
    """Whether a tile of dW fits in the registers: NVIDIA GPUs below compute capability 8.0 (T4, V100) keep kilobytes of
    it a thread in memory, which is slower than a copy of the rows of dy."""
    if device.type != "cuda" or torch.version.hip is not None:
        return True
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _row_norms(x: Tensor) -> Tensor:
    # In fp64 the square of every 16-bit or fp32 number is exact and in range.
    norms: Tensor = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
    return norms if x.dtype == torch.float64 else norms.to(torch.float32)


def _weight_gradient(dy: Tensor, kept: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    precision = accumulation_dtype(kept.dtype)
    scaled = dy.index_select(0, rows).to(precision) * weights.to(precision)[:, None]
    return scaled.to(kept.dtype).t() @ kept
