"""Triton kernels of the MS-norms' backward.

Gradients of weight and bias are sums over rows. Each program sums its own rows in fp32 registers and writes one partial
row; one more launch sums the partial rows of both. There are no atomics: equal inputs give equal bits.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from memopt.kernels.base.launch import LaunchConfig, launch_config
from memopt.kernels.base.rows import Rows, laid_out_like, rows_of
from memopt.kernels.base.tiles_triton import in_rows, offsets, on_device_of, read, write
from memopt.kernels.norm.reference import NormArguments

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]

#: Warps on each multiprocessor for programs that loop over many rows: as many as fit with 64 registers a thread.
_WARPS = 32
#: Most elements of a tile that leave registers for two sums: 8 for each of the 1024 threads of the largest program.
_TWO_SUMS = 8192
#: Least bytes of a tile for pipelining: few such programs fit a multiprocessor, so each loads rows while it computes.
_PIPELINED = 16384
#: The assumed number of multiprocessors without a GPU: in the interpreter, and for compilation ahead of time.
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
    """dx in the dtype of x with the strides of x_hat if it has no gaps; dweight and dbias (hidden,) in `dtype`.

    Args:
        dy: (..., hidden) with any strides; it may be expanded.
        needs: which of dx, dweight and dbias are needed; the others are None.

    Moves dy and x_hat in and dx out, which is the floor: 6 bytes per element in 16-bit, 12 in fp32; 4 more per row, and
    per program 8 for each element of a partial row. dy is read again for dbias if a row and two sums do not fit into
    the registers. Rows longer than the tile are read a second time for dx (from the cache, since few rows are in use at
    a time), and once more for dweight and dbias.
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
    # Rows that are no whole number of vectors are read by element, which takes twice as many registers.
    held = config.rows * config.block * (2 if hidden * x_hat.element_size() % 16 else 1)
    at_once = hidden <= config.block and held <= 2 * _TWO_SUMS
    if at_once and held > _TWO_SUMS and all(needs[1:]):
        dx, dweight, _ = launch_backward(dy, x_hat, rstd, weight, arguments, (needs[0], True, False), dtype)
        return dx, dweight, launch_backward(dy, x_hat, rstd, None, arguments, (False, False, True), dtype)[2]
    rstd = rstd.contiguous()
    weight = None if weight is None else weight.contiguous()
    with on_device_of(x_hat):
        if at_once:
            pipelined = any(needs[1:]) and held <= _TWO_SUMS and held * x_hat.element_size() >= _PIPELINED
            return _walked(dy, x_hat, rstd, weight, dx, layout, arguments, needs, config, 1 + pipelined, dtype)
        block = min(config.block, _TWO_SUMS)
        if dx is not None:
            norm_long_dx_kernel[(layout.count,)](
                dy, x_hat, rstd, weight, dx, hidden, *_rows(dy).arguments, *layout.arguments,
                RMS=spec.kind == "rms", INPUT=arguments.keeps_input, OFFSET=spec.offset == 1, BLOCK=block,
                num_warps=config.num_warps, enable_fp_fusion=True,
            )  # fmt: skip
        # As many elements, but more rows: sums over rows want few columns.
        columns = max(block // 8, 16)
        config = replace(config, rows=config.rows * block // columns, block=columns)
        return dx, *_walked(dy, x_hat, rstd, None, None, layout, arguments, needs, config, 1, dtype)[1:]


def _walked(
    dy: Tensor, x_hat: Tensor, rstd: Tensor, weight: Tensor | None, dx: Tensor | None, layout: Rows,
    arguments: NormArguments, needs: tuple[bool, bool, bool], config: LaunchConfig, stages: int, dtype: torch.dtype,
) -> Gradients:  # fmt: skip
    """dx and the sums; if dx is None only the sums, by blocks of columns."""
    hidden, tiles, sums = x_hat.size(-1), triton.cdiv(layout.count, config.rows), any(needs[1:])
    if dx is None and not sums:
        return None, None, None
    columns = triton.cdiv(hidden, config.block)
    programs = min(tiles, triton.cdiv(_programs(x_hat.device, config.num_warps), columns))
    steps = triton.cdiv(tiles, programs) if sums else 1
    programs = triton.cdiv(tiles, steps)
    dweight, dbias = (rstd.new_empty(programs, hidden) if need else None for need in needs[1:])
    norm_backward_kernel[(programs, columns)](
        dy, x_hat, rstd, weight, dx, dweight, dbias, layout.count, hidden, steps,
        *_rows(dy).arguments, *layout.arguments, RMS=arguments.spec.kind == "rms", INPUT=arguments.keeps_input,
        OFFSET=arguments.spec.offset == 1,
        ROWS=config.rows, BLOCK=config.block, STAGES=stages, num_warps=config.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
    return dx, *_sums(dweight, dbias, dtype)


@triton.jit(do_not_specialize=["count", "steps"])
def norm_backward_kernel(  # type: ignore[no-untyped-def]
    dy_ptr, x_hat_ptr, rstd_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    count, hidden, steps,
    dy_n1, dy_n2, dy_s0, dy_s1, dy_s2,
    x_n1, x_n2, x_s0, x_s1, x_s2,
    RMS: tl.constexpr, INPUT: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program walks over `steps` tiles of whole rows, or without dx of a block of columns. Pointers of what is not
    wanted are None. With INPUT, the tensor in the place of x_hat is x."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if dx_ptr is None:
        column += tl.program_id(1) * BLOCK
    col = column[None, :]
    if weight_ptr is not None and dx_ptr is not None and ROWS > 1:
        scale = offset_weight(weight_ptr, col, hidden, OFFSET)
    if dweight_ptr is not None:
        dweight = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    if dbias_ptr is not None:
        dbias = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for step in tl.range(steps, num_stages=STAGES):
        row = ((program * steps + step) * ROWS + tl.arange(0, ROWS))[:, None]
        inside = (row < count) & (col < hidden)
        dy = read(dy_ptr, offsets(row, col, dy_n1, dy_n2, dy_s0, dy_s1, dy_s2, False), inside, False)
        if dbias_ptr is not None:
            dbias += dy
        if dx_ptr is not None or dweight_ptr is not None:
            place = offsets(row, col, x_n1, x_n2, x_s0, x_s1, x_s2, False)
            x_hat = read(x_hat_ptr, place, inside, False)
            if INPUT:
                rstd = tl.load(rstd_ptr + row, mask=row < count, other=0.0)
        if dweight_ptr is not None:
            if INPUT:
                dweight += (dy * rstd) * x_hat
            else:
                dweight += dy * x_hat
        if dx_ptr is not None:
            g = dy
            if weight_ptr is not None:
                if ROWS == 1:
                    # Read again for every row, from the cache; registers hold it only where rows share it.
                    scale = offset_weight(weight_ptr, col, hidden, OFFSET)
                g = dy * scale
            # Both means and rstd ahead of their first use: registers do not hold g and the difference at a time.
            # Without sums there are enough of them, and one less for rstd lets another program in.
            if dweight_ptr is not None and not INPUT:
                rstd = tl.load(rstd_ptr + row, mask=row < count, other=0.0)
            mean_g = (tl.sum(g, axis=1) / hidden)[:, None]
            mean_gx = (tl.sum(g * x_hat, axis=1) / hidden)[:, None]
            if INPUT:
                mean_gx *= rstd * rstd
            inner = g - x_hat * mean_gx
            if not RMS:
                inner -= mean_g
            if dweight_ptr is None and not INPUT:
                rstd = tl.load(rstd_ptr + row, mask=row < count, other=0.0)
            write(dx_ptr, place, rstd * inner, inside, False)
    partial = program * hidden + column
    if dweight_ptr is not None:
        tl.store(dweight_ptr + partial, tl.sum(dweight, axis=0), mask=column < hidden)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, tl.sum(dbias, axis=0), mask=column < hidden)


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
    RMS: tl.constexpr, INPUT: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row in two passes: the row's two means, then dx. With INPUT, the tensor in the place of x_hat is x."""
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
    if INPUT:  # twice the factor that makes x_hat of x
        mean_gx *= rstd * rstd
    for start in range(0, hidden, BLOCK):
        col = start + lane
        g = scaled_gradient(dy_ptr + dy_row, weight_ptr, col, hidden, OFFSET)
        inner = g - read(x_hat_ptr, x_row + col, col < hidden, False) * mean_gx
        if not RMS:
            inner -= mean_g
        write(dx_ptr, x_row + col, rstd * inner, col < hidden, False)


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
    """Just enough programs to occupy the device: each program writes a partial row."""
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
