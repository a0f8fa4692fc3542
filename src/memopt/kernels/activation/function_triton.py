"""Triton kernels of the known activations: forward and backward, one pass each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memopt.kernels.activation.scalar_triton import gradient, value, value_and_slope
from memopt.kernels.base.rows import laid_out_like
from memopt.kernels.base.tiles_triton import in_rows, offsets, on_device_of, read, tile, tiling, write


@triton.jit(do_not_specialize=["count"])
def activation_forward_kernel(  # type: ignore[no-untyped-def]
    z_ptr, h_ptr,
    count, hidden,
    z_n1, z_n2, z_s0, z_s1, z_s2,
    h_n1, h_n2, h_s0, h_s1, h_s2,
    KIND: tl.constexpr, FLAT: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """h = f(z)"""
    row, col, inside = tile(count, hidden, FLAT, ROWS, COLS)
    z = read(z_ptr, offsets(row, col, z_n1, z_n2, z_s0, z_s1, z_s2, FLAT), inside, EVEN)
    write(h_ptr, offsets(row, col, h_n1, h_n2, h_s0, h_s1, h_s2, FLAT), value(z, KIND), inside, EVEN)


@triton.jit(do_not_specialize=["count"])
def activation_backward_kernel(  # type: ignore[no-untyped-def]
    dh_ptr, z_ptr, dz_ptr, h_ptr,
    count, hidden,
    z_n1, z_n2, z_s0, z_s1, z_s2,
    dh_n1, dh_n2, dh_s0, dh_s1, dh_s2,
    dz_n1, dz_n2, dz_s0, dz_s1, dz_s2,
    RECOMPUTE: tl.constexpr,
    KIND: tl.constexpr, FLAT: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """dz = f'(z) * dh,   h = f(z)"""
    row, col, inside = tile(count, hidden, FLAT, ROWS, COLS)
    z = read(z_ptr, offsets(row, col, z_n1, z_n2, z_s0, z_s1, z_s2, FLAT), inside, EVEN)
    dh = read(dh_ptr, offsets(row, col, dh_n1, dh_n2, dh_s0, dh_s1, dh_s2, FLAT), inside, EVEN)
    h, slope = value_and_slope(z, KIND)
    place = offsets(row, col, dz_n1, dz_n2, dz_s0, dz_s1, dz_s2, FLAT)
    write(dz_ptr, place, gradient(dh, z, slope, KIND), inside, EVEN)
    if RECOMPUTE:
        write(h_ptr, place, h, inside, EVEN)


def launch_forward(z: Tensor, kind: str, dtype: torch.dtype | None = None) -> Tensor:
    """h = f(z) in `dtype`, by default the dtype of z, and (if z has no gaps) with the strides of z.

    Moves z.element_size() bytes per element in and h.element_size() out, which is the floor.
    """
    h = torch.empty_like(z, dtype=dtype)
    if not z.numel():
        return h
    tiles = tiling("activation_forward", z, h)
    if tiles is None:
        return laid_out_like(z, launch_forward(z.contiguous(), kind, dtype))
    with on_device_of(z):
        activation_forward_kernel[tiles.grid](
            z, h, tiles.count, tiles.hidden, *tiles.rows[0], *tiles.rows[1], KIND=kind, **tiles.meta
        )
    return h


def launch_backward(
    dh: Tensor, z: Tensor, kind: str, recompute: bool = False, overwrites_dh: bool = False, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """dz = f'(z) * dh and, with `recompute`, h = f(z) (else None), with the dtype and, where z is dense, the strides
    of z.

    Moves dh and z in and dz and h out, once each, which is the floor. `dh` may be expanded. With `overwrites_dh` h is
    written over dh, if it fits: each program has read its elements of dh by then. `out`, for dz, may be z itself.
    """
    dz = torch.empty_like(z) if out is None else out
    h = None
    if recompute:
        fits = overwrites_dh and dh.dtype == z.dtype and dh.is_contiguous() and z.is_contiguous()
        h = dh if fits else torch.empty_like(z)
    if not z.numel():
        return dz, h
    tiles = tiling("activation_backward", z, dh, dz)
    if tiles is None:
        # If only dh has no rows, copy dh alone; z and dz are used in place.
        dh = in_rows(dh)
        tiles = tiling("activation_backward", z, dh, dz)
    if tiles is None:
        packed_dz, packed_h = launch_backward(dh.contiguous(), z.contiguous(), kind, recompute)
        return dz.copy_(packed_dz), None if h is None or packed_h is None else h.copy_(packed_h)
    with on_device_of(z):
        activation_backward_kernel[tiles.grid](
            dh, z, dz, dz if h is None else h, tiles.count, tiles.hidden,
            *tiles.rows[0], *tiles.rows[1], *tiles.rows[2], RECOMPUTE=recompute, KIND=kind, **tiles.meta,
        )  # fmt: skip
    return dz, h
