"""Triton kernels of the cross-entropy of rows: statistics in one read, the gradient in one read and one write."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from memopt.kernels.base.launch import MOST_WARPS, LaunchConfig, launch_config
from memopt.kernels.base.tiles_triton import on_device_of
from memopt.kernels.loss.reference import RowFactors

_VECTOR_BYTES = 16


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    x, top, log_sum, is_target, hit, flat, weight_ptr, weight_sum_ptr, col, inside,
    WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr,
):  # fmt: skip
    p = tl.exp((x - top) - log_sum)
    dx = hit * tl.where(is_target, p - 1, p)
    unused = hit == 0
    if SMOOTHED:
        weight = 1.0
        if WEIGHTED:
            weight = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
        dx += flat * (tl.load(weight_sum_ptr) * p - weight)
        unused &= flat == 0
    return tl.where(unused, 0.0, dx)


@triton.jit
def loss_forward_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, statistics_ptr, weight_ptr, target_ptr, hit_ptr, flat_ptr, weight_sum_ptr, out_ptr,
    columns, stride, out_stride,
    WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, PICKED: tl.constexpr, GRADIENT: tl.constexpr,
    LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One row a program. A maximum and a sum for each lane of VECTOR elements, which one thread reads: the loop has no
    barrier, and little more than one exponential for each element. GRADIENT reads the row once more, from its end, of
    which the cache holds most, and writes `out`, which may be the logits."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    place = statistics_ptr + row * 4
    target = -1
    if PICKED:  # the barriers of the sums below come between this and the writing of `out`
        target = tl.load(target_ptr + row)
        is_here = (target >= 0) & (target < columns)
        picked = tl.load(logits_ptr + row * stride + target, mask=is_here, other=0.0).to(tl.float32)
        tl.store(place + 3, picked, mask=is_here)
    top = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    of_all = tl.zeros((LANES,), tl.float32)
    for start in range(0, columns, LANES * VECTOR):
        inside = start + col < columns
        x = tl.load(logits_ptr + row * stride + start + col, mask=inside, other=float("-inf")).to(tl.float32)
        above = tl.maximum(top, tl.max(x, axis=1))
        # A lane that saw nothing but -inf: -inf - -inf would be NaN.
        base = tl.where(above == float("-inf"), 0.0, above)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base[:, None]), axis=1)
        top = above
        if SMOOTHED:
            if WEIGHTED:
                x *= tl.load(weight_ptr + start + col, mask=inside, other=0.0).to(tl.float32)
            of_all += tl.sum(tl.where(inside, x, 0.0), axis=1)
    before = tl.load(place)
    above = tl.maximum(before, tl.max(top, axis=0))
    base = tl.where(above == float("-inf"), 0.0, above)
    summed = tl.load(place + 1) * tl.exp(before - base) + tl.sum(total * tl.exp(top - base), axis=0)
    tl.store(place, above)
    tl.store(place + 1, summed)
    if SMOOTHED:
        tl.store(place + 2, tl.load(place + 2) + tl.sum(of_all, axis=0))
    if GRADIENT:
        hit = tl.load(hit_ptr + row)
        flat = tl.load(flat_ptr + row) if SMOOTHED else hit
        steps = tl.cdiv(columns, LANES * VECTOR)
        for step in range(steps):
            at = (steps - 1 - step) * LANES * VECTOR + col
            inside = at < columns
            x = tl.load(logits_ptr + row * stride + at, mask=inside, other=0.0).to(tl.float32)
            dx = _gradient(
                x, above, tl.log(summed), at == target, hit, flat, weight_ptr, weight_sum_ptr, at, inside,
                WEIGHTED, SMOOTHED,
            )  # fmt: skip
            tl.store(out_ptr + row * out_stride + at, dx.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def loss_backward_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, target_ptr, lse_ptr, hit_ptr, flat_ptr, weight_ptr, weight_sum_ptr, out_ptr,
    columns, stride, out_stride,
    WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A piece of one row a program. `out` may be the logits: every element is read and written by one thread."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < columns
    hit = tl.load(hit_ptr + row)
    flat = tl.load(flat_ptr + row) if SMOOTHED else hit
    # Of a row without a gradient nothing is read. Triton 3.9 interprets no mask that joins a scalar and a block.
    read = tl.where((hit == 0) & (flat == 0), 0, columns)
    x = tl.load(logits_ptr + row * stride + col, mask=col < read, other=0.0).to(tl.float32)
    dx = _gradient(
        x, tl.load(lse_ptr + row * 2), tl.load(lse_ptr + row * 2 + 1), col == tl.load(target_ptr + row), hit, flat,
        weight_ptr, weight_sum_ptr, col, inside, WEIGHTED, SMOOTHED,
    )  # fmt: skip
    tl.store(out_ptr + row * out_stride + col, dx.to(out_ptr.dtype.element_ty), mask=inside)


def launch_statistics(
    logits: Tensor, statistics: Tensor, weight: Tensor | None, smoothed: bool, target: Tensor | None = None,
    factors: RowFactors | None = None, out: Tensor | None = None,
) -> None:  # fmt: skip
    """As `memopt.kernels.loss.reference.update_statistics`; with `factors` and `out` also the gradient of whole rows.

    Moves logits.element_size() bytes per element in, once, which is the floor; the gradient out once.
    """
    if not logits.numel():
        return
    logits, place = _in_rows(logits), None if out is None else _in_rows(out)
    config = _config("loss_forward", logits)
    # Twice the threads for the gradient: with fewer rows read at a time, the cache holds more of them for its read.
    warps = config.num_warps if factors is None else min(MOST_WARPS, 2 * config.num_warps)
    vector = _VECTOR_BYTES // logits.element_size()
    of_rows = (None, None, None) if factors is None else _of_rows(factors, statistics)
    with on_device_of(logits):
        loss_forward_kernel[(len(logits),)](
            logits, statistics, None if weight is None else weight.contiguous(),
            None if target is None else target.contiguous(), *of_rows, place,
            logits.size(1), logits.stride(0), 0 if place is None else place.stride(0),
            WEIGHTED=weight is not None, SMOOTHED=smoothed, PICKED=target is not None, GRADIENT=factors is not None,
            LANES=config.block // vector, VECTOR=vector, num_warps=warps, enable_fp_fusion=True,
        )  # fmt: skip
    if out is not None and place is not None and place is not out:
        out.copy_(place)


def launch_gradient(
    logits: Tensor, target: Tensor, lse: Tensor, factors: RowFactors, weight: Tensor | None, out: Tensor
) -> None:
    """As `memopt.kernels.loss.reference.block_gradient`.

    Moves the logits in and the gradient out, once each, which is the floor.
    """
    if not logits.numel():
        return
    logits, place = _in_rows(logits), _in_rows(out)
    rows, columns = logits.shape
    config = _config("loss_backward", logits)
    hit, flat, weight_sum = _of_rows(factors, lse)
    with on_device_of(logits):
        loss_backward_kernel[(rows, triton.cdiv(columns, config.block))](
            logits, target.contiguous(), lse.contiguous(), hit, flat,
            None if weight is None else weight.contiguous(), weight_sum, place,
            columns, logits.stride(0), place.stride(0),
            WEIGHTED=weight is not None, SMOOTHED=flat is not None, BLOCK=config.block,
            num_warps=config.num_warps, enable_fp_fusion=True,
        )  # fmt: skip
    if place is not out:
        out.copy_(place)


def _of_rows(factors: RowFactors, like: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The factors as tensors for the kernels. A number is filled in on the device: a copy from the host would wait."""
    if factors.flat is None:
        return factors.hit.contiguous(), None, None
    total = factors.weight_sum
    total = total.to(like.dtype) if isinstance(total, Tensor) else like.new_full((), total)
    return factors.hit.contiguous(), factors.flat, total


def _in_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.size(1) == 1 or tensor.stride(1) == 1 else tensor.contiguous()


def _config(kernel: str, logits: Tensor) -> LaunchConfig:
    columns = logits.size(1)
    config = launch_config(kernel, columns, logits.dtype)
    least = _VECTOR_BYTES // logits.element_size()
    return LaunchConfig(1, max(least, min(config.block, triton.next_power_of_2(columns))), config.num_warps)
