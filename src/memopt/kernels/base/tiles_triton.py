"""The tiles of elementwise kernels: one tile of elements per program.

A tile is a run of adjacent elements (flat) if all tensors have one dense layout, else some rows by some columns.
In both cases each thread reads one vector of 128 bits per tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from memopt.kernels.base.launch import launch_config, planned
from memopt.kernels.base.rows import rows_in, rows_of


@triton.jit
def tile(count, hidden, FLAT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows and columns of this program's tile (int64), and which of them are inside."""
    if FLAT:
        row = tl.program_id(0).to(tl.int64)
        col = row * COLS + tl.arange(0, COLS)
        inside = col < hidden
    else:
        row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
        col = (tl.program_id(1).to(tl.int64) * COLS + tl.arange(0, COLS))[None, :]
        inside = (row < count) & (col < hidden)
    return row, col, inside


@triton.jit
def offsets(row, col, n1, n2, s0, s1, s2, FLAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offsets of a tile's elements in a tensor with these `Rows`, in elements from its pointer."""
    offset = col
    if not FLAT:
        # n1 and n2 are 1 for evenly spaced rows; Triton specialises on 1 and removes the divisions.
        offset = (row // (n1 * n2)) * s0 + ((row // n2) % n1) * s1 + (row % n2) * s2 + col
    return offset


@triton.jit
def read(ptr, offset, inside, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements in fp32; 0 outside."""
    x = tl.load(ptr + offset) if EVEN else tl.load(ptr + offset, mask=inside, other=0.0)
    return x.to(tl.float32)


@triton.jit
def write(ptr, offset, x, inside, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round `x` once and store it."""
    if EVEN:
        tl.store(ptr + offset, x.to(ptr.dtype.element_ty))
    else:
        tl.store(ptr + offset, x.to(ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Tiling:
    """A launch of an elementwise kernel over tensors of one shape."""

    grid: tuple[int, ...]
    count: int
    hidden: int
    rows: tuple[tuple[int, int, int, int, int], ...]
    """n1, n2, s0, s1, s2 of each tensor."""
    meta: dict[str, int | bool]
    """FLAT, EVEN, ROWS, COLS and the options of the launch."""


_FLAT_ROWS = (1, 1, 0, 0, 0)


def tiling(kernel: str, *tensors: Tensor) -> Tiling | None:
    """The tiles of `kernel` over `tensors`, which have one shape and at least one element.

    Returns:
        None if the tensors are not flat and one of them has no rows (see `rows_of`).
    """
    first = tensors[0]
    return _tiling(kernel, first.dtype, tuple(first.shape), tuple([tensor.stride() for tensor in tensors]))


@planned
def _tiling(
    kernel: str, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...]
) -> Tiling | None:
    flat = _have_one_layout(shape, strides)
    rows = [] if flat else [rows_in(shape, stride) for stride in strides]
    described = [r for r in rows if r is not None]
    if len(described) != len(rows):
        return None
    count, hidden = (1, math.prod(shape)) if flat else (described[0].count, shape[-1])
    config = launch_config(kernel, hidden, dtype)
    tile_size = config.rows * config.block
    cols = tile_size if flat else min(config.block, triton.next_power_of_2(hidden))
    tile_rows = 1 if flat else tile_size // cols
    return Tiling(
        grid=(triton.cdiv(hidden, cols),) if flat else (triton.cdiv(count, tile_rows), triton.cdiv(hidden, cols)),
        count=count,
        hidden=hidden,
        rows=tuple(r.arguments for r in described) or (_FLAT_ROWS,) * len(strides),
        meta={
            "FLAT": flat,
            "EVEN": hidden % cols == 0 and count % tile_rows == 0,
            "ROWS": tile_rows,
            "COLS": cols,
            "num_warps": config.num_warps,
            "enable_fp_fusion": True,
        },
    )


def in_rows(tensor: Tensor) -> Tensor:
    """`tensor` itself if it has rows (see `rows_of`), else a contiguous copy."""
    return tensor if rows_of(tensor) is not None else tensor.contiguous()


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's device current: Triton launches on the current device."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _ON_DEVICE
    return torch.cuda.device_of(tensor)


_ON_DEVICE: AbstractContextManager[object] = nullcontext()


def _have_one_layout(shape: tuple[int, ...], strides: Sequence[tuple[int, ...]]) -> bool:
    """Whether all tensors are dense and have their elements in the same order in memory."""
    if all(_is_dense(zip(reversed(stride), reversed(shape), strict=True)) for stride in strides):
        return True
    in_memory = sorted(zip(strides[0], shape, strict=True))
    return _is_dense(in_memory) and all(stride == strides[0] for stride in strides)


def _is_dense(sides: Iterable[tuple[int, int]]) -> bool:
    """Whether dimensions with these (stride, size), the innermost first, leave no gaps."""
    expected = 1
    for step, size in sides:
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True
