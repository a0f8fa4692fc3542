"""Triton kernel of seeded dropout: one pass that draws the mask on the fly."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memopt.kernels.base.counter_triton import uniform
from memopt.kernels.base.rows import laid_out_like
from memopt.kernels.base.tiles_triton import offsets, on_device_of, read, tile, tiling, write

#: The kernel whose tiles are used: its threads have one vector of each tensor, which leaves registers for the drawing.
_TILES_OF = "activation_backward"


@triton.jit(do_not_specialize=["count", "seed"])
def dropout_kernel(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr,
    count, hidden,
    x_n1, x_n2, x_s0, x_s1, x_s2,
    y_n1, y_n2, y_s0, y_s1, y_s2,
    seed, threshold, scale,
    FLAT: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """y = x * scale where uniform(index, seed) >= threshold, else x * 0"""
    row, col, inside = tile(count, hidden, FLAT, ROWS, COLS)
    index = col if FLAT else row * hidden + col
    x = read(x_ptr, offsets(row, col, x_n1, x_n2, x_s0, x_s1, x_s2, FLAT), inside, EVEN)
    # A product and no select, so that NaN and infinity propagate where they are dropped.
    y = x * tl.where(uniform(index, seed) >= threshold, scale, 0.0)
    write(y_ptr, offsets(row, col, y_n1, y_n2, y_s0, y_s1, y_s2, FLAT), y, inside, EVEN)


def launch_dropout(x: Tensor, seed: int, threshold: float, scale: float) -> Tensor:
    """y, with the dtype and (where x has no gaps) the strides of x. `threshold` and `scale` are exact in fp32.

    Moves x in and y out, once each, which is the floor. `x` may be expanded.
    """
    y = torch.empty_like(x)
    if not x.numel():
        return y
    # A contiguous tensor, so that tiles are flat only if the order in memory is the order of the index.
    logical = torch.empty(x.shape, dtype=x.dtype, device="meta")
    tiles = tiling(_TILES_OF, x, y, logical)
    if tiles is None:
        return laid_out_like(x, launch_dropout(x.contiguous(), seed, threshold, scale))
    with on_device_of(x):
        dropout_kernel[tiles.grid](
            x, y, tiles.count, tiles.hidden, *tiles.rows[0], *tiles.rows[1], seed % 2**64, threshold, scale,
            **tiles.meta,
        )  # fmt: skip
    return y
