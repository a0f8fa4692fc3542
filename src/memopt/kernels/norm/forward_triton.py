"""Triton kernels of the MS-norms: forward, and the recomputed output. The backward is in `backward_triton`.

A program holds all columns of some rows in registers. A loop covers rows that are longer than the tile of the launch
table. Statistics are fp32, and never computed as E[x^2] - E[x]^2, which cancels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memopt.kernels.base.launch import launch_config
from memopt.kernels.base.rows import laid_out_like, rows_of
from memopt.kernels.base.tiles_triton import in_rows, offsets, on_device_of, read, write
from memopt.kernels.norm.backward_triton import launch_backward
from memopt.kernels.norm.reference import NormArguments

__all__ = ["launch_affine", "launch_backward", "launch_forward"]


def launch_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    arguments: NormArguments,
    residual: Tensor | None = None,
    copies: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """y and x_hat (both (..., hidden), in the dtypes of `arguments`) and rstd (fp32, (..., 1)).

    With a residual, which has the shape and dtype of x, this is the norm of x + residual, with PyTorch's rounding of
    the sum. y is None if the output is x_hat; x_hat is x, and not written, if `arguments` say so. Kind "rms" keeps the
    strides of x if x has no gaps, kind "layer" is contiguous.

    Moves x in, x_hat and y out, which is the floor: per element 6 bytes in 16-bit with an affine, 4 without one, 12 and
    8 in fp32; 4 more per row. A residual adds 2 and 4; writing the sum and reading it again would take 6 and 12. Rows
    longer than the tile are read a second time, mostly from the cache. The first program fills `copies`, which is
    contiguous, with weight and bias, one after the other: a launch of its own would take longer.
    """
    has_output = weight is not None or bias is not None or arguments.casts
    kept_dtype, rms = arguments.kept_dtype, arguments.spec.kind == "rms"
    if arguments.keeps_input:
        x_hat = x
    else:
        x_hat = torch.empty_like(x, dtype=kept_dtype) if rms else x.new_empty(x.shape, dtype=kept_dtype)
    source, target = rows_of(x), rows_of(x_hat)
    if source is None or target is None:
        y, packed, rstd = launch_forward(x.contiguous(), weight, bias, arguments, residual, copies)
        kept = x if arguments.keeps_input else laid_out_like(x_hat, packed)
        return None if y is None else laid_out_like(x_hat, y), kept, rstd
    y = torch.empty_like(x_hat, dtype=arguments.dtype) if has_output else None
    rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    if not x.numel():
        return y, x_hat, rstd
    hidden = x.size(-1)
    config = launch_config("norm_forward", hidden, x.dtype)
    residual = None if residual is None else in_rows(residual)
    added = source if residual is None else rows_of(residual)
    assert added is not None
    written = None if arguments.keeps_input else x_hat
    tensors = (x, residual, _dense(weight), _dense(bias), y, written, rstd, copies)
    sizes = (source.count, hidden, arguments.spec.eps_in(x.dtype))
    strides = (*source.arguments, *added.arguments, *target.arguments)
    constants = _affine_options(weight, bias, arguments) | {"RMS": rms}
    with on_device_of(x):
        if hidden <= config.block:
            norm_forward_kernel[(triton.cdiv(source.count, config.rows),)](
                *tensors,
                *sizes,
                *strides,
                **constants,
                ROWS=config.rows,
                BLOCK=config.block,
                num_warps=config.num_warps,
            )
        else:
            norm_long_forward_kernel[(source.count,)](
                *tensors, *sizes, *strides, **constants, BLOCK=config.block, num_warps=config.num_warps
            )
    return y, x_hat, rstd


def launch_affine(x_hat: Tensor, weight: Tensor | None, bias: Tensor | None, arguments: NormArguments) -> Tensor:
    """y = (offset + weight) * x_hat + bias in the dtype of the output, with the strides of x_hat where it has no gaps.

    Moves x_hat in and y out, which is the floor: 4 bytes per element in 16-bit, 8 in fp32.
    """
    y = torch.empty_like(x_hat, dtype=arguments.dtype)
    if not y.numel():
        return y
    source, target = rows_of(x_hat), rows_of(y)
    if source is None or target is None:
        return laid_out_like(x_hat, launch_affine(x_hat.contiguous(), weight, bias, arguments))
    hidden = x_hat.size(-1)
    config = launch_config("norm_affine", hidden, x_hat.dtype)
    with on_device_of(x_hat):
        norm_affine_kernel[(triton.cdiv(source.count, config.rows), triton.cdiv(hidden, config.block))](
            x_hat, _dense(weight), _dense(bias), y, source.count, hidden, *source.arguments, *target.arguments,
            **_affine_options(weight, bias, arguments), ROWS=config.rows, BLOCK=config.block,
            num_warps=config.num_warps,
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["count"])
def norm_forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, x_hat_ptr, rstd_ptr, copies_ptr,
    count, hidden, eps,
    x_n1, x_n2, x_s0, x_s1, x_s2,
    r_n1, r_n2, r_s0, r_s1, r_s2,
    y_n1, y_n2, y_s0, y_s1, y_s2,
    RMS: tl.constexpr, OFFSET: tl.constexpr,
    X_HAT: tl.constexpr, SCALE: tl.constexpr, PRODUCT: tl.constexpr, SUM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows that fit into the tile: mean, then the mean square of what is left of x, from one read."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < count) & (col < hidden)
    place = offsets(row, col, x_n1, x_n2, x_s0, x_s1, x_s2, False)
    r_place = offsets(row, col, r_n1, r_n2, r_s0, r_s1, r_s2, False)
    x = read_sum(x_ptr, residual_ptr, place, r_place, inside)
    if not RMS:
        x = tl.where(inside, x - (tl.sum(x, axis=1) / hidden)[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / hidden + eps)[:, None]
    x_hat = x * rstd
    out = offsets(row, col, y_n1, y_n2, y_s0, y_s1, y_s2, False)
    if x_hat_ptr is not None:
        write(x_hat_ptr, out, x_hat, inside, False)
        tl.store(rstd_ptr + row, rstd, mask=row < count)
    if y_ptr is not None:
        y = scaled_and_shifted(x_hat, weight_ptr, bias_ptr, col, hidden, OFFSET, X_HAT, SCALE, PRODUCT, SUM)
        write(y_ptr, out, y, inside, False)
    if x_hat_ptr is None:
        tl.store(rstd_ptr + row, rstd, mask=row < count)
    if copies_ptr is not None:
        copy_affine(weight_ptr, bias_ptr, copies_ptr, tl.arange(0, BLOCK), hidden)


@triton.jit
def norm_long_forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, x_hat_ptr, rstd_ptr, copies_ptr,
    count, hidden, eps,
    x_n1, x_n2, x_s0, x_s1, x_s2,
    r_n1, r_n2, r_s0, r_s1, r_s2,
    y_n1, y_n2, y_s0, y_s1, y_s2,
    RMS: tl.constexpr, OFFSET: tl.constexpr,
    X_HAT: tl.constexpr, SCALE: tl.constexpr, PRODUCT: tl.constexpr, SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row in two passes: statistics, then the output.

    Each lane keeps mean and sum of squared deviations of its own elements (Welford); they are merged once, at the end
    of the first pass (Chan, Golub and LeVeque 1983).
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    x_row = offsets(row, 0, x_n1, x_n2, x_s0, x_s1, x_s2, False)
    r_row = offsets(row, 0, r_n1, r_n2, r_s0, r_s1, r_s2, False)
    y_row = offsets(row, 0, y_n1, y_n2, y_s0, y_s1, y_s2, False)
    lane_mean = tl.zeros([BLOCK], dtype=tl.float32)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, hidden, BLOCK):
        col = start + lane
        inside = col < hidden
        x = read_sum(x_ptr, residual_ptr, x_row + col, r_row + col, inside)
        if RMS:
            squares += x * x
        else:
            deviation = tl.where(inside, x - lane_mean, 0.0)
            lane_mean += deviation * (1.0 / (start // BLOCK + 1))
            squares += deviation * (x - lane_mean)
    mean = 0.0
    if not RMS:
        elements = ((hidden - 1 - lane) // BLOCK + 1).to(tl.float32)
        mean = tl.sum(lane_mean * elements, axis=0) / hidden
        squares += elements * (lane_mean - mean) * (lane_mean - mean)
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / hidden + eps)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, hidden, BLOCK):
        col = start + lane
        inside = col < hidden
        x_hat = (read_sum(x_ptr, residual_ptr, x_row + col, r_row + col, inside) - mean) * rstd
        if x_hat_ptr is not None:
            write(x_hat_ptr, y_row + col, x_hat, inside, False)
        if y_ptr is not None:
            y = scaled_and_shifted(x_hat, weight_ptr, bias_ptr, col, hidden, OFFSET, X_HAT, SCALE, PRODUCT, SUM)
            write(y_ptr, y_row + col, y, inside, False)
        if copies_ptr is not None:
            copy_affine(weight_ptr, bias_ptr, copies_ptr, col, hidden)


@triton.jit(do_not_specialize=["count"])
def norm_affine_kernel(  # type: ignore[no-untyped-def]
    x_hat_ptr, weight_ptr, bias_ptr, y_ptr,
    count, hidden,
    x_n1, x_n2, x_s0, x_s1, x_s2,
    y_n1, y_n2, y_s0, y_s1, y_s2,
    OFFSET: tl.constexpr,
    X_HAT: tl.constexpr, SCALE: tl.constexpr, PRODUCT: tl.constexpr, SUM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The output from the kept x_hat: one tile of rows and columns."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    col = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < count) & (col < hidden)
    x_hat = read(x_hat_ptr, offsets(row, col, x_n1, x_n2, x_s0, x_s1, x_s2, False), inside, False)
    y = scaled_and_shifted(x_hat, weight_ptr, bias_ptr, col, hidden, OFFSET, X_HAT, SCALE, PRODUCT, SUM)
    write(y_ptr, offsets(row, col, y_n1, y_n2, y_s0, y_s1, y_s2, False), y, inside, False)


@triton.jit
def copy_affine(weight_ptr, bias_ptr, copies_ptr, col, hidden):  # type: ignore[no-untyped-def]
    """The first program writes weight and bias, one after the other."""
    if tl.program_id(0) == 0:
        if weight_ptr is not None:
            tl.store(copies_ptr + col, tl.load(weight_ptr + col, mask=col < hidden), mask=col < hidden)
            copies_ptr += hidden
        if bias_ptr is not None:
            tl.store(copies_ptr + col, tl.load(bias_ptr + col, mask=col < hidden), mask=col < hidden)


@triton.jit
def read_sum(x_ptr, residual_ptr, x_offset, residual_offset, inside):  # type: ignore[no-untyped-def]
    """x, or x + residual as PyTorch's addition rounds it."""
    x = read(x_ptr, x_offset, inside, False)
    if residual_ptr is not None:
        x = (x + read(residual_ptr, residual_offset, inside, False)).to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def scaled_and_shifted(  # type: ignore[no-untyped-def]
    x_hat, weight_ptr, bias_ptr, col, hidden, OFFSET: tl.constexpr,
    X_HAT: tl.constexpr, SCALE: tl.constexpr, PRODUCT: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """(offset + weight) * x_hat + bias, each step rounded to the dtype named for it."""
    y = x_hat.to(X_HAT).to(tl.float32)
    if weight_ptr is not None:
        scale = read(weight_ptr, col, col < hidden, False)
        if OFFSET:
            scale = (scale + 1).to(SCALE).to(tl.float32)
        y = (y * scale).to(PRODUCT).to(tl.float32)
    if bias_ptr is not None:
        y = (y + read(bias_ptr, col, col < hidden, False)).to(SUM).to(tl.float32)
    return y


_TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _affine_options(weight: Tensor | None, bias: Tensor | None, arguments: NormArguments) -> dict[str, Any]:
    """The constants of :func:`scaled_and_shifted`, and the option of the launch that depends on them.

    The dtypes of the steps are those of `memopt.kernels.norm.reference.affine`.
    """
    spec, x_dtype = arguments.spec, arguments.x_dtype
    x_hat = scale = product = total = torch.float32
    if spec.cast == "before":
        x_hat = x_dtype
        scale = x_dtype if weight is None else weight.dtype
        product = torch.promote_types(scale, x_dtype)
        total = product if bias is None else torch.promote_types(product, bias.dtype)
    return {
        "OFFSET": spec.offset == 1,
        "X_HAT": _TL_DTYPES[x_hat],
        "SCALE": _TL_DTYPES[scale],
        "PRODUCT": _TL_DTYPES[product],
        "SUM": _TL_DTYPES[total],
        # The compiler would fuse a 16-bit product and sum into one operation, and so leave out a rounding.
        "enable_fp_fusion": bias is None or product == torch.float32,
    }


def _dense(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()
