"""Triton kernels of the gated product: forward, and one backward pass that can also recompute the product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memopt.kernels.activation.scalar_triton import gradient, value, value_and_slope
from memopt.kernels.base.tiles_triton import in_rows, offsets, on_device_of, read, tile, tiling, write


@triton.jit(do_not_specialize=["count"])
def gated_forward_kernel(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, h_ptr,
    count, hidden,
    gate_n1, gate_n2, gate_s0, gate_s1, gate_s2,
    up_n1, up_n2, up_s0, up_s1, up_s2,
    KIND: tl.constexpr, FLAT: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """h = f(gate) * up"""
    row, col, inside = tile(count, hidden, FLAT, ROWS, COLS)
    gate = read(gate_ptr, offsets(row, col, gate_n1, gate_n2, gate_s0, gate_s1, gate_s2, FLAT), inside, EVEN)
    up = read(up_ptr, offsets(row, col, up_n1, up_n2, up_s0, up_s1, up_s2, FLAT), inside, EVEN)
    write(h_ptr, offsets(row, col, 1, 1, hidden, 0, 0, FLAT), value(gate, KIND) * up, inside, EVEN)


@triton.jit(do_not_specialize=["count"])
def gated_backward_kernel(  # type: ignore[no-untyped-def]
    dh_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, h_ptr,
    count, hidden,
    dgate_stride, dup_stride,
    gate_n1, gate_n2, gate_s0, gate_s1, gate_s2,
    up_n1, up_n2, up_s0, up_s1, up_s2,
    dh_n1, dh_n2, dh_s0, dh_s1, dh_s2,
    RECOMPUTE: tl.constexpr,
    KIND: tl.constexpr, FLAT: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """dgate = f'(gate) * up * dh,   dup = f(gate) * dh,   h = f(gate) * up"""
    row, col, inside = tile(count, hidden, FLAT, ROWS, COLS)
    gate = read(gate_ptr, offsets(row, col, gate_n1, gate_n2, gate_s0, gate_s1, gate_s2, FLAT), inside, EVEN)
    up = read(up_ptr, offsets(row, col, up_n1, up_n2, up_s0, up_s1, up_s2, FLAT), inside, EVEN)
    dh = read(dh_ptr, offsets(row, col, dh_n1, dh_n2, dh_s0, dh_s1, dh_s2, FLAT), inside, EVEN)
    activated, slope = value_and_slope(gate, KIND)
    dgate = gradient(dh * up, gate, slope, KIND)
    write(dgate_ptr, offsets(row, col, 1, 1, dgate_stride, 0, 0, FLAT), dgate, inside, EVEN)
    write(dup_ptr, offsets(row, col, 1, 1, dup_stride, 0, 0, FLAT), dh * activated, inside, EVEN)
    if RECOMPUTE:
        write(h_ptr, offsets(row, col, 1, 1, hidden, 0, 0, FLAT), activated * up, inside, EVEN)


def launch_forward(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """h = f(gate) * up, contiguous; `gate` and `up` have one shape and dtype and may be halves of one tensor.

    Moves gate and up in and h out, once each, which is the floor.
    """
    h = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if not gate.numel():
        return h
    tiles = tiling("gated_forward", gate, up, h)
    if tiles is None:
        gate, up = in_rows(gate), in_rows(up)
        tiles = tiling("gated_forward", gate, up, h)
    assert tiles is not None
    with on_device_of(gate):
        gated_forward_kernel[tiles.grid](
            gate, up, h, tiles.count, tiles.hidden, *tiles.rows[0], *tiles.rows[1], KIND=kind, **tiles.meta
        )
    return h


def launch_backward(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    kind: str,
    recompute: bool,
    out: tuple[Tensor, Tensor] | None = None,
    overwrites_dh: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dgate, dup and, with `recompute`, h (else None). `dh` may be expanded, and of another floating dtype.

    Moves dh, gate and up in and dgate, dup and h out, once each, which is the floor.

    Args:
        out: where to write dgate and dup: evenly spaced rows with the shape and dtype of gate. Contiguous by default.
        overwrites_dh: write h over dh, if it fits there: each program has read its elements of dh by then.
    """
    if out is None:
        dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        dup = torch.empty_like(dgate)
    else:
        dgate, dup = out
    h = None
    if recompute:
        fits = overwrites_dh and dh.dtype == gate.dtype and dh.is_contiguous()
        h = dh if fits else torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if not gate.numel():
        return dgate, dup, h
    tiles = tiling("gated_backward", gate, up, dh, dgate, dup)
    if tiles is None:
        dh, gate, up = in_rows(dh), in_rows(gate), in_rows(up)
        tiles = tiling("gated_backward", gate, up, dh, dgate, dup)
    assert tiles is not None, "out has rows that a kernel cannot describe"
    assert all(rows[:2] == (1, 1) for rows in tiles.rows[3:]), "out has rows that are not evenly spaced"
    with on_device_of(gate):
        gated_backward_kernel[tiles.grid](
            dh, gate, up, dgate, dup, dgate if h is None else h, tiles.count, tiles.hidden,
            tiles.rows[3][2], tiles.rows[4][2], *tiles.rows[0], *tiles.rows[1], *tiles.rows[2],
            RECOMPUTE=recompute, KIND=kind, **tiles.meta,
        )  # fmt: skip
    return dgate, dup, h
