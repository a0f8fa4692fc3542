"""Triton kernels of the MS-norms' backward.

Gradients of weight and bias are sums over rows. Each program sums its own rows in fp32 registers and writes one partial
row; one launch more adds those of both up. No atomics: the same inputs give the same bits.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from memopt.kernels.base.launch import LaunchConfig, launch_config
from memopt.kernels.base.rows import Rows, laid_out_like, rows_of
from memopt.kernels.base.tiles_triton import in_rows, offsets, on_device_of, read, write
from memopt.kernels.norm.reference import NormArguments, NormSpec

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]

#: Warps that a multiprocessor should have at work where programs walk over many rows.
_WARPS = 16
#: Stands for the multiprocessors where there is no GPU: the interpreter, and compilation ahead of time.
_MULTIPROCESSORS_WITHOUT_GPU = 4
#: Rows and columns of the tile in which partial rows are summed: a row of it is a line of the cache.
_SUMMED = 32


def launch_backward(
    dy: Tensor,
    x_hat: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    arguments: NormArguments,
    needs: tuple[bool, bool, bool],
    dtype: torch.dtype = torch.float32,
) -> Gradients:
    """dx in the dtype of x with the strides of x_hat where it has no gaps; dweight and dbias (hidden,) in `dtype`.

    Args:
        dy: (..., hidden) with any strides, expanded ones too.
        needs: which of the three are wanted; the others are None.

    Moves dy and x_hat in and dx out, which is the floor: 6 bytes per element in 16-bit, 12 in fp32; 4 more per row, and
    per program 8 for each element of a partial row. Rows longer than the tile are read a second time for dx, mostly
    from the cache, and once more for dweight and dbias.
    """
    hidden, spec = x_hat.size(-1), arguments.spec
    dx = torch.empty_like(x_hat, dtype=arguments.x_dtype) if needs[0] else None
    if not x_hat.numel():
        dweight, dbias = (rstd.new_zeros(hidden, dtype=dtype) if need else None for need in needs[1:])
        return dx, dweight, dbias
    dy = in_rows(dy)
    layout = rows_of(x_hat)
    if layout is None or (dx is not None and rows_of(dx) != layout):
        dx, dweight, dbias = launch_backward(dy, x_hat.contiguous(), rstd, weight, arguments, needs, dtype)
        return None if dx is None else laid_out_like(x_hat, dx), dweight, dbias
    config = launch_config("norm_backward", hidden, x_hat.dtype)
    rstd = rstd.contiguous()
    weight = None if weight is None else weight.contiguous()
    with on_device_of(x_hat):
        if hidden <= config.block:
            partial = _rows_at_once(dy, x_hat, rstd, weight, dx, layout, spec, needs, config)
            return dx, *_sums(*partial, dtype)
        if dx is not None:
            _dx_of_long_rows(dy, x_hat, rstd, weight, dx, layout, spec, config)
        return dx, *_sums(*_sums_of_long_rows(dy, x_hat, layout, needs, config), dtype)


def _rows_at_once(
    dy: Tensor,
    x_hat: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    dx: Tensor | None,
    layout: Rows,
    spec: NormSpec,
    needs: tuple[bool, bool, bool],
    config: LaunchConfig,
) -> tuple[Tensor | None, Tensor | None]:
    """Writes dx; the partial rows of dweight and dbias."""
    hidden, tiles = x_hat.size(-1), triton.cdiv(layout.count, config.rows)
    programs = min(tiles, _programs(x_hat.device, config.num_warps)) if any(needs[1:]) else tiles
    steps = triton.cdiv(tiles, programs)
    programs = triton.cdiv(tiles, steps)
    dweight, dbias = (rstd.new_empty(programs, hidden) if need else None for need in needs[1:])
    norm_backward_kernel[(programs,)](
        dy, x_hat, rstd, weight, dx, dweight, dbias, layout.count, hidden, steps,
        *_rows(dy).arguments, *layout.arguments, RMS=spec.kind == "rms", OFFSET=spec.offset == 1,
        ROWS=config.rows, BLOCK=config.block, num_warps=config.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
    return dweight, dbias


def _dx_of_long_rows(
    dy: Tensor,
    x_hat: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    dx: Tensor,
    layout: Rows,
    spec: NormSpec,
    config: LaunchConfig,
) -> None:
    norm_long_dx_kernel[(layout.count,)](
        dy, x_hat, rstd, weight, dx, x_hat.size(-1), *_rows(dy).arguments, *layout.arguments,
        RMS=spec.kind == "rms", OFFSET=spec.offset == 1, BLOCK=config.block,
        num_warps=config.num_warps, enable_fp_fusion=True,
    )  # fmt: skip


def _sums_of_long_rows(
    dy: Tensor, x_hat: Tensor, layout: Rows, needs: tuple[bool, bool, bool], config: LaunchConfig
) -> tuple[Tensor | None, Tensor | None]:
    if not any(needs[1:]):
        return None, None
    # The tile has as many elements as that of the other kernels, but more rows: sums over rows want few columns.
    hidden, block = x_hat.size(-1), max(config.block // 8, 16)
    rows = config.rows * config.block // block
    columns, tiles = triton.cdiv(hidden, block), triton.cdiv(layout.count, rows)
    programs = min(tiles, triton.cdiv(_programs(x_hat.device, config.num_warps), columns))
    steps = triton.cdiv(tiles, programs)
    programs = triton.cdiv(tiles, steps)
    dweight, dbias = (dy.new_empty((programs, hidden), dtype=torch.float32) if need else None for need in needs[1:])
    norm_long_sums_kernel[(programs, columns)](
        dy, x_hat, dweight, dbias, layout.count, hidden, steps, *_rows(dy).arguments, *layout.arguments,
        ROWS=rows, BLOCK=block, num_warps=config.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
    return dweight, dbias


@triton.jit(do_not_specialize=["count", "steps"])
def norm_backward_kernel(  # type: ignore[no-untyped-def]
    dy_ptr, x_hat_ptr, rstd_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    count, hidden, steps,
    dy_n1, dy_n2, dy_s0, dy_s1, dy_s2,
    x_n1, x_n2, x_s0, x_s1, x_s2,
    RMS: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows that fit into the tile; a program walks over `steps` tiles. Pointers of what is not wanted are None."""
    program = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    if weight_ptr is not None and dx_ptr is not None and ROWS > 1:
        scale = offset_weight(weight_ptr, col, hidden, OFFSET)
    if dweight_ptr is not None:
        dweight = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    if dbias_ptr is not None:
        dbias = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for step in range(steps):
        row = ((program * steps + step) * ROWS + tl.arange(0, ROWS))[:, None]
        inside = (row < count) & (col < hidden)
        dy = read(dy_ptr, offsets(row, col, dy_n1, dy_n2, dy_s0, dy_s1, dy_s2, False), inside, False)
        if dbias_ptr is not None:
            dbias += dy
        if dx_ptr is not None or dweight_ptr is not None:
            place = offsets(row, col, x_n1, x_n2, x_s0, x_s1, x_s2, False)
            x_hat = read(x_hat_ptr, place, inside, False)
        if dweight_ptr is not None:
            dweight += dy * x_hat
        if dx_ptr is not None:
            g = dy
            if weight_ptr is not None:
                if ROWS == 1:
                    # Read again for every row, from the cache; registers hold it only where rows share it.
                    scale = offset_weight(weight_ptr, col, hidden, OFFSET)
                g = dy * scale
            inner = g - x_hat * (tl.sum(g * x_hat, axis=1) / hidden)[:, None]
            if not RMS:
                inner -= (tl.sum(g, axis=1) / hidden)[:, None]
            rstd = tl.load(rstd_ptr + row, mask=row < count, other=0.0)
            write(dx_ptr, place, rstd * inner, inside, False)
    partial = program * hidden + tl.arange(0, BLOCK)
    inside_row = tl.arange(0, BLOCK) < hidden
    if dweight_ptr is not None:
        tl.store(dweight_ptr + partial, tl.sum(dweight, axis=0), mask=inside_row)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, tl.sum(dbias, axis=0), mask=inside_row)


@triton.jit(do_not_specialize=["programs"])
def norm_sums_kernel(  # type: ignore[no-untyped-def]
    dweight_ptr, dbias_ptr, weight_sum_ptr, bias_sum_ptr, programs, hidden, TILE: tl.constexpr
):  # fmt: skip
    """The sums of the programs' partial rows, for one block of columns."""
    col = tl.program_id(0) * TILE + tl.arange(0, TILE)
    dweight = tl.zeros([TILE, TILE], dtype=tl.float32)
    dbias = tl.zeros([TILE, TILE], dtype=tl.float32)
    for start in range(0, programs, TILE):
        row = (start + tl.arange(0, TILE))[:, None]
        inside = (row < programs) & (col < hidden)[None, :]
        if dweight_ptr is not None:
            dweight += read(dweight_ptr, row * hidden + col[None, :], inside, False)
        if dbias_ptr is not None:
            dbias += read(dbias_ptr, row * hidden + col[None, :], inside, False)
    if dweight_ptr is not None:
        write(weight_sum_ptr, col, tl.sum(dweight, axis=0), col < hidden, False)
    if dbias_ptr is not None:
        write(bias_sum_ptr, col, tl.sum(dbias, axis=0), col < hidden, False)


@triton.jit
def norm_long_dx_kernel(  # type: ignore[no-untyped-def]
    dy_ptr, x_hat_ptr, rstd_ptr, weight_ptr, dx_ptr,
    hidden,
    dy_n1, dy_n2, dy_s0, dy_s1, dy_s2,
    x_n1, x_n2, x_s0, x_s1, x_s2,
    RMS: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row in two passes: the row's two means, then dx."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    dy_row = offsets(row, 0, dy_n1, dy_n2, dy_s0, dy_s1, dy_s2, False)
    x_row = offsets(row, 0, x_n1, x_n2, x_s0, x_s1, x_s2, False)
    sum_g = tl.zeros([BLOCK], dtype=tl.float32)
    sum_gx = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, hidden, BLOCK):
        col = start + lane
        g = scaled_gradient(dy_ptr + dy_row, weight_ptr, col, hidden, OFFSET)
        sum_gx += g * read(x_hat_ptr, x_row + col, col < hidden, False)
        if not RMS:
            sum_g += g
    mean_gx = tl.sum(sum_gx, axis=0) / hidden
    mean_g = tl.sum(sum_g, axis=0) / hidden
    rstd = tl.load(rstd_ptr + row)
    for start in range(0, hidden, BLOCK):
        col = start + lane
        g = scaled_gradient(dy_ptr + dy_row, weight_ptr, col, hidden, OFFSET)
        inner = g - read(x_hat_ptr, x_row + col, col < hidden, False) * mean_gx
        if not RMS:
            inner -= mean_g
        write(dx_ptr, x_row + col, rstd * inner, col < hidden, False)


@triton.jit(do_not_specialize=["count", "steps"])
def norm_long_sums_kernel(  # type: ignore[no-untyped-def]
    dy_ptr, x_hat_ptr, dweight_ptr, dbias_ptr,
    count, hidden, steps,
    dy_n1, dy_n2, dy_s0, dy_s1, dy_s2,
    x_n1, x_n2, x_s0, x_s1, x_s2,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dweight and dbias of one block of columns over the program's rows."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    col = column[None, :]
    if dweight_ptr is not None:
        dweight = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    if dbias_ptr is not None:
        dbias = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for step in range(steps):
        row = ((program * steps + step) * ROWS + tl.arange(0, ROWS))[:, None]
        inside = (row < count) & (col < hidden)
        dy = read(dy_ptr, offsets(row, col, dy_n1, dy_n2, dy_s0, dy_s1, dy_s2, False), inside, False)
        if dbias_ptr is not None:
            dbias += dy
        if dweight_ptr is not None:
            dweight += dy * read(x_hat_ptr, offsets(row, col, x_n1, x_n2, x_s0, x_s1, x_s2, False), inside, False)
    partial = program * hidden + column
    if dweight_ptr is not None:
        tl.store(dweight_ptr + partial, tl.sum(dweight, axis=0), mask=column < hidden)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, tl.sum(dbias, axis=0), mask=column < hidden)


@triton.jit
def scaled_gradient(dy_row_ptr, weight_ptr, col, hidden, OFFSET: tl.constexpr):  # type: ignore[no-untyped-def]
    """g = dy * (offset + weight)"""
    g = read(dy_row_ptr, col, col < hidden, False)
    if weight_ptr is not None:
        g *= offset_weight(weight_ptr, col, hidden, OFFSET)
    return g


@triton.jit
def offset_weight(weight_ptr, col, hidden, OFFSET: tl.constexpr):  # type: ignore[no-untyped-def]
    """offset + weight"""
    scale = read(weight_ptr, col, col < hidden, False)
    if OFFSET:
        scale += 1
    return scale


def _programs(device: torch.device, num_warps: int) -> int:
    """Enough programs to occupy the device, and no more: each writes a partial row."""
    return _multiprocessors(device) * max(1, _WARPS // num_warps)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda" or not torch.cuda.is_available():
        return _MULTIPROCESSORS_WITHOUT_GPU
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def _sums(dweight: Tensor | None, dbias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """The sums of the partial rows in `dtype`, both in one launch."""
    partial = dbias if dweight is None else dweight
    if partial is None:
        return None, None
    programs, hidden = partial.shape
    sums = [None if each is None else each.new_empty(hidden, dtype=dtype) for each in (dweight, dbias)]
    norm_sums_kernel[(triton.cdiv(hidden, _SUMMED),)](
        dweight, dbias, *sums, programs, hidden, TILE=_SUMMED, num_warps=4, enable_fp_fusion=True
    )
    return sums[0], sums[1]


def _rows(tensor: Tensor) -> Rows:
    rows = rows_of(tensor)
    assert rows is not None
    return rows
