"""Triton kernels of `memopt.kernels.quantize.quantize`: one row of a tile is one group of elements.

They give the bytes of the PyTorch reference: IEEE division, and no fused multiply-add.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memopt.kernels.base.counter_triton import uniform
from memopt.kernels.base.tiles_triton import on_device_of, read, write
from memopt.kernels.quantize.layout import GROUP

#: Groups of a tile. With 4 warps a thread has two vectors of a 16-bit tensor.
ROWS = 16
_INFINITY = tl.constexpr(float("inf"))


@triton.jit(do_not_specialize=["seed"])
def quantize_kernel(  # type: ignore[no-untyped-def]
    x_ptr, codes_ptr, scales_ptr,
    numel, seed,
    BITS: tl.constexpr, STOCHASTIC: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """code = floor((x - low) / step + u)"""
    LEVELS: tl.constexpr = (1 << BITS) - 1
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
    step = tl.div_rn(high - low, tl.full((ROWS,), LEVELS, tl.float32))
    broken = tl.max((inside & (finite == 0)).to(tl.int32), axis=1)
    sound = (broken == 0) & (tl.abs(low + step * LEVELS) < _INFINITY)
    step = tl.where(sound, step, float("nan"))
    begun = row * GROUP < numel
    write(scales_ptr, row * 2, low, begun, EVEN)
    write(scales_ptr, row * 2 + 1, step, begun, EVEN)

    low, step = low[:, None], step[:, None]
    # Comparisons with NaN are false: the code is then 0, as in a constant row.
    position = tl.where(step > 0, tl.div_rn(x - low, tl.broadcast_to(step, x.shape)), 0.0)
    below = tl.floor(position)
    fraction = position - below
    up = uniform(index, seed) < fraction if STOCHASTIC else fraction > 0.5
    # The quotient of the largest element may be rounded above LEVELS.
    code = tl.minimum(tl.maximum(below + up.to(tl.float32), 0.0), LEVELS).to(tl.int32)
    if BITS == 4:
        code = tl.where(inside, code, 0)  # the half byte after an odd number of them
        first, second = tl.split(tl.reshape(code, (ROWS, GROUP // 2, 2)))
        byte = row[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        write(codes_ptr, byte, first | (second << 4), byte * 2 < numel, EVEN)
    else:
        write(codes_ptr, index, code, inside, EVEN)


@triton.jit
def dequantize_kernel(  # type: ignore[no-untyped-def]
    codes_ptr, scales_ptr, x_ptr,
    numel,
    BITS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """x = low + code * step"""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index = row[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = index < numel
    begun = row * GROUP < numel
    low = read(scales_ptr, row * 2, begun, EVEN)[:, None]
    step = read(scales_ptr, row * 2 + 1, begun, EVEN)[:, None]
    if BITS == 4:
        byte = row[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        pair = tl.load(codes_ptr + byte, mask=byte * 2 < numel, other=0)
        code = tl.interleave(pair & 0xF, pair >> 4).to(tl.float32)
    else:
        code = read(codes_ptr, index, inside, EVEN)
    write(x_ptr, index, low + code * step, inside, EVEN)


def launch_quantize(x: Tensor, bits: int, seed: int | None) -> tuple[Tensor, Tensor]:
    """Codes and scales of `x` (one-dimensional, contiguous), as in `memopt.kernels.quantize.layout.Quantized`.

    Moves x in and the codes and scales out, once each, which is the floor.
    """
    codes = x.new_empty(triton.cdiv(x.numel() * bits, 8), dtype=torch.uint8)
    scales = x.new_empty(triton.cdiv(x.numel(), GROUP), 2, dtype=torch.float32)
    if x.numel():
        with on_device_of(x):
            quantize_kernel[_grid(x.numel())](
                x, codes, scales, x.numel(), (seed or 0) % 2**64,
                BITS=bits, STOCHASTIC=seed is not None, **_meta(x.numel()),
            )  # fmt: skip
    return codes, scales


def launch_dequantize(codes: Tensor, scales: Tensor, bits: int, numel: int, dtype: torch.dtype) -> Tensor:
    """The values of the codes, (numel,) of `dtype`.

    Moves the codes and scales in and x out, once each, which is the floor.
    """
    x = codes.new_empty(numel, dtype=dtype)
    if numel:
        with on_device_of(codes):
            dequantize_kernel[_grid(numel)](codes, scales, x, numel, BITS=bits, **_meta(numel))
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
