"""Triton kernels of a sampled linear: norms of rows, a gather, and the weight gradient of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memopt.kernels.base.tiles_triton import on_device_of

#: Elements of a tile of the norms and of the gather, and the most columns of a tile. With 4 warps a thread has two
#: vectors of a 16-bit tensor.
_TILE, _COLS = 2048, 1024
#: Edge of large and of small tiles of dW; rows that are added at a time; rows of tiles that share reads of `kept`.
_LARGE, _SMALL, _STEP, _GROUP = 128, 64, 32, 8
#: Large tiles are used if dW has at least so many of them: about the multiprocessors of a data-centre GPU.
_FULL = 128
#: Numbers beyond these are squared in units of _UNIT or its inverse, and summed apart (Blue, ACM TOMS 4, 1978).
_BIG, _TINY, _UNIT = tl.constexpr(2.0**50), tl.constexpr(2.0**-50), tl.constexpr(2.0**80)


@triton.jit
def row_norms_kernel(  # type: ignore[no-untyped-def]
    x_ptr, norms_ptr,
    count, hidden, row_stride, col_stride,
    EVEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """norm = sqrt(sum x^2)"""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    big = tl.zeros((ROWS, COLS), tl.float32)
    middle = tl.zeros((ROWS, COLS), tl.float32)
    tiny = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, hidden, COLS):
        col = start + tl.arange(0, COLS).to(tl.int64)
        place = x_ptr + row[:, None] * row_stride + col[None, :] * col_stride
        if EVEN:
            x = tl.load(place).to(tl.float32)
        else:
            x = tl.load(place, mask=(row < count)[:, None] & (col < hidden)[None, :], other=0.0).to(tl.float32)
        is_big, is_tiny = tl.abs(x) > _BIG, tl.abs(x) < _TINY
        x *= tl.where(is_big, 1 / _UNIT, tl.where(is_tiny, _UNIT, 1.0))
        square = x * x
        big += tl.where(is_big, square, 0.0)
        tiny += tl.where(is_tiny, square, 0.0)
        # NaN is neither big nor tiny.
        middle += tl.where(is_big | is_tiny, 0.0, square)
    high, mid, low = tl.sum(big, axis=1), tl.sum(middle, axis=1), tl.sum(tiny, axis=1)
    with_big = tl.sqrt_rn(high + (mid / _UNIT) / _UNIT) * _UNIT
    without_big = tl.sqrt_rn(mid + (low / _UNIT) / _UNIT)
    norm = tl.where(high > 0, with_big, tl.where(mid == 0, tl.sqrt_rn(low) / _UNIT, without_big))
    tl.store(norms_ptr + row, norm, mask=row < count)


@triton.jit
def gather_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, rows_ptr, kept_ptr,
    count, hidden, row_stride, col_stride,
    EVEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """kept = x[rows]"""
    slot = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1).to(tl.int64) * COLS + tl.arange(0, COLS)
    row = tl.load(rows_ptr + slot, mask=slot < count, other=0).to(tl.int64)
    source = x_ptr + row[:, None] * row_stride + col[None, :] * col_stride
    target = kept_ptr + slot[:, None] * hidden + col[None, :]
    if EVEN:
        tl.store(target, tl.load(source))
    else:
        inside = (slot < count)[:, None] & (col < hidden)[None, :]
        tl.store(target, tl.load(source, mask=inside), mask=inside)


@triton.jit
def weight_gradient_kernel(  # type: ignore[no-untyped-def]
    dy_ptr, kept_ptr, rows_ptr, weights_ptr, dw_ptr,
    outs, ins, count,
    dy_row_stride, dy_col_stride, kept_row_stride, kept_col_stride,
    PRECISION: tl.constexpr, EVEN: tl.constexpr,
    OUT: tl.constexpr, IN: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """dw = (weights * dy[rows])^T kept"""
    tile_out, tile_in = tl.swizzle2d(
        tl.program_id(0) // tl.cdiv(ins, IN), tl.program_id(0) % tl.cdiv(ins, IN),
        tl.cdiv(outs, OUT), tl.cdiv(ins, IN), GROUP,
    )  # fmt: skip
    out_col = tile_out.to(tl.int64) * OUT + tl.arange(0, OUT)
    in_col = tile_in.to(tl.int64) * IN + tl.arange(0, IN)
    dw = tl.zeros((OUT, IN), tl.float32)
    for start in range(0, count, STEP):
        slot = start + tl.arange(0, STEP).to(tl.int64)
        # Slots past the last one have weight 0 and read row 0.
        row = tl.load(rows_ptr + slot, mask=slot < count, other=0).to(tl.int64)
        weight = tl.load(weights_ptr + slot, mask=slot < count, other=0.0)
        dy_place = dy_ptr + row[:, None] * dy_row_stride + out_col[None, :] * dy_col_stride
        kept_place = kept_ptr + slot[:, None] * kept_row_stride + in_col[None, :] * kept_col_stride
        if EVEN:
            dy = tl.load(dy_place)
            kept = tl.load(kept_place)
        else:
            inside = (slot < count)[:, None]
            dy = tl.load(dy_place, mask=inside & (out_col < outs)[None, :], other=0.0)
            kept = tl.load(kept_place, mask=inside & (in_col < ins)[None, :], other=0.0)
        scaled = (dy.to(tl.float32) * weight[:, None]).to(kept.dtype)
        dw = tl.dot(tl.trans(scaled), kept, dw, input_precision=PRECISION)
    place = dw_ptr + out_col[:, None] * ins + in_col[None, :]
    if EVEN:
        tl.store(place, dw.to(dw_ptr.dtype.element_ty))
    else:
        tl.store(place, dw.to(dw_ptr.dtype.element_ty), mask=(out_col < outs)[:, None] & (in_col < ins)[None, :])


def launch_row_norms(x: Tensor) -> Tensor:
    """Norms of the rows of `x` (n, d), fp32 (n,). Moves x in once, which is the floor, and 4 bytes a row out."""
    count, hidden = x.shape
    norms = x.new_empty(count, dtype=torch.float32)
    if not hidden:
        return norms.zero_()
    if count:
        rows, cols, even = _tile(count, hidden)
        with on_device_of(x):
            row_norms_kernel[(triton.cdiv(count, rows),)](
                x, norms, count, hidden, *x.stride(), EVEN=even, ROWS=rows, COLS=cols, num_warps=4
            )
    return norms


def launch_gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], contiguous. Moves the rows in and out once each, which is the floor."""
    count, hidden = rows.numel(), x.size(1)
    kept = x.new_empty(count, hidden)
    if kept.numel():
        tile_rows, cols, even = _tile(count, hidden)
        grid = (triton.cdiv(count, tile_rows), triton.cdiv(hidden, cols))
        with on_device_of(x):
            gather_rows_kernel[grid](
                x, rows.contiguous(), kept, count, hidden, *x.stride(),
                EVEN=even, ROWS=tile_rows, COLS=cols, num_warps=4,
            )  # fmt: skip
    return kept


def launch_weight_gradient(dy: Tensor, kept: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """dW (out, in) in the dtype of `kept`, each element a sum in a fixed order. Allocates only the result."""
    outs, (count, ins) = dy.size(1), kept.shape
    dw = kept.new_empty(outs, ins)
    if not count:
        return dw.zero_()
    if not dw.numel():
        return dw
    full = triton.cdiv(outs, _LARGE) * triton.cdiv(ins, _LARGE) >= _FULL
    # `torch.get_float32_matmul_precision` would raise an error after `fp32_precision` was set, as transformers'
    # `TrainingArguments(tf32=True)` does. Triton compiles TF32 for no AMD GPU but gfx942, even for 16-bit numbers.
    of_fp32 = kept.dtype == torch.float32 and torch.version.hip is None
    is_tf32 = of_fp32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    # fp32 operands take twice the shared memory and registers.
    size = _LARGE if full and kept.dtype.itemsize == 2 else _SMALL
    with on_device_of(kept):
        weight_gradient_kernel[(triton.cdiv(outs, size) * triton.cdiv(ins, size),)](
            dy, kept, rows.contiguous(), weights.contiguous(), dw,
            outs, ins, count, *dy.stride(), *kept.stride(),
            PRECISION="tf32" if is_tf32 else "ieee",
            EVEN=outs % size == 0 and ins % size == 0 and count % _STEP == 0,
            OUT=size, IN=size, STEP=_STEP, GROUP=_GROUP, num_warps=8 if size == _LARGE else 4, num_stages=3,
        )  # fmt: skip
    return dw


def _tile(count: int, hidden: int) -> tuple[int, int, bool]:
    """Rows and columns of a tile, and whether tiles of that size cover the tensor exactly."""
    cols = min(triton.next_power_of_2(hidden), _COLS)
    rows = _TILE // cols
    return rows, cols, count % rows == 0 and hidden % cols == 0
