"""Triton kernels of `memopt.kernels.quantize.quantize`: one row of a tile is one group of elements.

Their results equal the PyTorch reference's byte for byte: they use IEEE division, and no fused multiply-add.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memopt.kernels.base.counter_triton import uniform
from memopt.kernels.base.tiles_triton import on_device_of, read, write
from memopt.kernels.quantize.layout import GROUP, LEVELS

#: Groups of a tile. With 4 warps a thread has two vectors of a 16-bit tensor.
ROWS = 16
_INFINITY = tl.constexpr(float("inf"))
_LEVELS = tl.constexpr(LEVELS)


@triton.jit(do_not_specialize=["seed"])
def quantize_kernel(  # type: ignore[no-untyped-def]
    x_ptr, codes_ptr, scales_ptr,
    numel, seed,
    EVEN: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """code = floor((x - low) / step + u)"""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index = row[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = index < numel
    x = read(x_ptr, index, inside, EVEN)

    finite = tl.abs(x) < _INFINITY
    low = tl.min(tl.where(finite & inside, x, _INFINITY), axis=1)
    high = tl.max(tl.where(finite & inside, x, -_INFINITY), axis=1)
    # The minimum of 0 and -0 may be either.
    low = tl.where(low == 0, 0.0, low)
    high = tl.where(high == 0, 0.0, high)
    step = tl.div_rn(high - low, tl.full((ROWS,), _LEVELS, tl.float32))
    broken = tl.max((inside & (finite == 0)).to(tl.int32), axis=1)
    sound = (broken == 0) & (tl.abs(low + step * _LEVELS) < _INFINITY)
    step = tl.where(sound, step, float("nan"))
    begun = row * GROUP < numel
    write(scales_ptr, row * 2, low, begun, EVEN)
    write(scales_ptr, row * 2 + 1, step, begun, EVEN)

    low, step = low[:, None], step[:, None]
    # Comparisons with NaN are false: the code is then 0, as in a constant row.
    position = tl.where(step > 0, tl.div_rn(x - low, tl.broadcast_to(step, x.shape)), 0.0)
    below = tl.floor(position)
    up = uniform(index, seed) < position - below
    # The quotient of the largest element may be rounded above the largest code.
    code = tl.minimum(tl.maximum(below + up.to(tl.float32), 0.0), _LEVELS).to(tl.int32)
    write(codes_ptr, index, code, inside, EVEN)


@triton.jit
def dequantize_kernel(  # type: ignore[no-untyped-def]
    codes_ptr, scales_ptr, x_ptr,
    numel,
    EVEN: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """x = low + code * step"""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index = row[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = index < numel
    begun = row * GROUP < numel
    low = read(scales_ptr, row * 2, begun, EVEN)[:, None]
    step = read(scales_ptr, row * 2 + 1, begun, EVEN)[:, None]
    write(x_ptr, index, low + read(codes_ptr, index, inside, EVEN) * step, inside, EVEN)


def launch_quantize(x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of `x` (one-dimensional, contiguous), as in `memopt.kernels.quantize.layout.Quantized`.

    Moves x in and the codes and scales out, once each, which is the floor.
    """
    codes = x.new_empty(x.numel(), dtype=torch.uint8)
    scales = x.new_empty(triton.cdiv(x.numel(), GROUP), 2, dtype=torch.float32)
    if x.numel():
        with on_device_of(x):
            quantize_kernel[_grid(x.numel())](x, codes, scales, x.numel(), seed % 2**64, **_meta(x.numel()))
    return codes, scales


def launch_dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of the codes in `dtype`.

    Moves the codes and scales in and x out, once each, which is the floor.
    """
    x = codes.new_empty(codes.numel(), dtype=dtype)
    if x.numel():
        with on_device_of(codes):
            dequantize_kernel[_grid(x.numel())](codes, scales, x, x.numel(), **_meta(x.numel()))
    return x


def _grid(numel: int) -> tuple[int]:
    return (triton.cdiv(numel, ROWS * GROUP),)


def _meta(numel: int) -> dict[str, int | bool]:
    return {
        "EVEN": numel % (ROWS * GROUP) == 0,
        "ROWS": ROWS,
        "GROUP": GROUP,
        "num_warps": 4,
        "enable_fp_fusion": False,
    }
