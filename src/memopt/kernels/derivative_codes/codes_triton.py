"""Triton kernels of the codes of an activation's derivative: one packs codes, one multiplies a gradient by levels.

A program works on the 1024 elements that share a flag, in logical order. Thresholds, levels and the kind are constants
of the kernel. So nothing is copied to the device, and a captured CUDA graph refers to no tensor that could be freed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memopt.kernels.activation.scalar_triton import slope
from memopt.kernels.base.rows import rows_of
from memopt.kernels.base.tiles_triton import offsets, on_device_of, read
from memopt.kernels.derivative_codes.schemes import FLAG_GROUP, DerivativeCode, fp32_below

#: Equally many threads for warps of 32 and of 64: each thread reads one vector of a 16-bit tensor.
_WARPS = 2 if torch.version.hip else 4


@triton.jit
def encode_kernel(  # type: ignore[no-untyped-def]
    z_ptr, packed_ptr,
    count, code_bytes, hidden,
    n1, n2, s0, s1, s2,
    KIND: tl.constexpr, BITS: tl.constexpr, THRESHOLDS: tl.constexpr, LOW: tl.constexpr, SCALE: tl.constexpr,
    FLAT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """packed = codes of f'(z), then flags"""
    group = tl.program_id(0).to(tl.int64)
    index = group * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    z = read(z_ptr, _places(index, hidden, n1, n2, s0, s1, s2, FLAT), inside, EVEN)
    if BITS <= 3:
        codes = tl.zeros([BLOCK], tl.int32)
        for i in tl.static_range(2**BITS - 1):
            codes += (z > THRESHOLDS[i]).to(tl.int32)
        flagged = z != z
        if not EVEN:
            codes = tl.where(inside, codes, 0)
    else:
        d = slope(z, KIND)
        flagged = ~(tl.abs(d) < float("inf"))
        place = (tl.where(flagged, LOW, d) - LOW) * SCALE
        number = tl.floor(place + 0.5)
        number = tl.minimum(tl.maximum(number, 0.0), 2.0**BITS - 1)
        codes = number.to(tl.int32)
        if not EVEN:
            codes = tl.where(inside, codes, 0)
            flagged = flagged & inside
    _store_codes(packed_ptr, codes, group, code_bytes, BITS, EVEN, BLOCK)
    tl.store(packed_ptr + code_bytes + group, tl.max(flagged.to(tl.int32), axis=0).to(tl.uint8))


@triton.jit
def apply_kernel(  # type: ignore[no-untyped-def]
    dh_ptr, packed_ptr, dz_ptr,
    count, code_bytes, hidden,
    n1, n2, s0, s1, s2,
    BITS: tl.constexpr, LEVELS: tl.constexpr, LOW: tl.constexpr, STEP: tl.constexpr,
    FLAT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dz = dh * level of the code"""
    group = tl.program_id(0).to(tl.int64)
    index = group * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    dh = read(dh_ptr, _places(index, hidden, n1, n2, s0, s1, s2, FLAT), inside, EVEN)
    codes = _load_codes(packed_ptr, group, code_bytes, BITS, EVEN, BLOCK)
    if BITS <= 3:
        level = tl.full([BLOCK], LEVELS[0], tl.float32)
        for i in tl.static_range(1, 2**BITS):
            level = tl.where(codes >= i, LEVELS[i], level)
    else:
        # Exact: see `memopt.kernels.derivative_codes.fit`.
        level = LOW + codes.to(tl.float32) * STEP
    flag = tl.load(packed_ptr + code_bytes + group)
    dz = (dh * tl.where(flag != 0, float("nan"), level)).to(dz_ptr.dtype.element_ty)
    if EVEN:
        tl.store(dz_ptr + index, dz)
    else:
        tl.store(dz_ptr + index, dz, mask=inside)


@triton.jit
def _places(index, hidden, n1, n2, s0, s1, s2, FLAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offsets of the elements, by rows where the tensor is not contiguous."""
    place = index
    if not FLAT:
        row = index // hidden
        place = offsets(row, index - row * hidden, n1, n2, s0, s1, s2, False)
    return place


@triton.jit
def _store_codes(  # type: ignore[no-untyped-def]
    packed_ptr, codes, group, code_bytes, BITS: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    begin = group * (BLOCK * BITS // 8)
    if BITS == 3:
        # Eight codes make a word of 24 bits, and each word three bytes.
        words = tl.sum(tl.reshape(codes, [BLOCK // 8, 8]) << (tl.arange(0, 8) * 3)[None, :], axis=1)
        byte = tl.arange(0, 4)[None, :]
        place = begin + (tl.arange(0, BLOCK // 8) * 3)[:, None] + byte
        value = (words[:, None] >> byte * 8) & 255
        tl.store(packed_ptr + place, value.to(tl.uint8), mask=(byte < 3) & (place < code_bytes))
    else:
        per_byte: tl.constexpr = 8 // BITS
        if BITS != 8:
            shifts = (tl.arange(0, per_byte) * BITS)[None, :]
            codes = tl.sum(tl.reshape(codes, [BLOCK // per_byte, per_byte]) << shifts, axis=1)
        place = begin + tl.arange(0, BLOCK // per_byte)
        if EVEN:
            tl.store(packed_ptr + place, codes.to(tl.uint8))
        else:
            tl.store(packed_ptr + place, codes.to(tl.uint8), mask=place < code_bytes)


@triton.jit
def _load_codes(  # type: ignore[no-untyped-def]
    packed_ptr, group, code_bytes, BITS: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    begin = group * (BLOCK * BITS // 8)
    if BITS == 3:
        place = begin + tl.arange(0, BLOCK // 8) * 3
        words = _load_bytes(packed_ptr, place, code_bytes, EVEN)
        words |= _load_bytes(packed_ptr, place + 1, code_bytes, EVEN) << 8
        words |= _load_bytes(packed_ptr, place + 2, code_bytes, EVEN) << 16
        codes = tl.reshape((words[:, None] >> (tl.arange(0, 8) * 3)[None, :]) & 7, [BLOCK])
    else:
        per_byte: tl.constexpr = 8 // BITS
        codes = _load_bytes(packed_ptr, begin + tl.arange(0, BLOCK // per_byte), code_bytes, EVEN)
        if BITS != 8:
            shifts = (tl.arange(0, per_byte) * BITS)[None, :]
            codes = tl.reshape((codes[:, None] >> shifts) & (2**BITS - 1), [BLOCK])
    return codes


@triton.jit
def _load_bytes(packed_ptr, place, code_bytes, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """As int32; 0 past the codes."""
    value = tl.load(packed_ptr + place) if EVEN else tl.load(packed_ptr + place, mask=place < code_bytes, other=0)
    return value.to(tl.int32)


def launch_encode(z: Tensor, code: DerivativeCode) -> Tensor:
    """The packed codes and flags of z (any strides).

    Moves z in and `code.packed_bytes(n)` out, once each, which is the floor.
    """
    elements = z.numel()
    packed = torch.empty(code.packed_bytes(elements), dtype=torch.uint8, device=z.device)
    if not elements:
        return packed
    z, rows = _in_logical_order(z)
    value_code = not code.thresholds
    with on_device_of(z):
        encode_kernel[(triton.cdiv(elements, FLAG_GROUP),)](
            z, packed, elements, code.code_bytes(elements), *rows,
            KIND=code.kind if value_code else "", BITS=code.bits,
            THRESHOLDS=tuple(map(fp32_below, code.thresholds)),
            LOW=code.levels[0], SCALE=1 / code.step if value_code else 1.0,
            **_meta(z, elements),
        )  # fmt: skip
    return packed


def launch_apply(dh: Tensor, packed: Tensor, code: DerivativeCode) -> Tensor:
    """dh (any strides) times the levels of the codes in `packed`; contiguous.

    Moves dh and `packed` in and the result out, once each, which is the floor.
    """
    elements = dh.numel()
    dz = torch.empty(dh.shape, dtype=dh.dtype, device=dh.device)
    if not elements:
        return dz
    dh, rows = _in_logical_order(dh)
    value_code = not code.thresholds
    with on_device_of(dh):
        apply_kernel[(triton.cdiv(elements, FLAG_GROUP),)](
            dh, packed, dz, elements, code.code_bytes(elements), *rows,
            BITS=code.bits, LEVELS=() if value_code else code.levels,
            LOW=code.levels[0], STEP=code.step if value_code else 1.0,
            **_meta(dh, elements),
        )  # fmt: skip
    return dz


def _in_logical_order(tensor: Tensor) -> tuple[Tensor, tuple[int, int, int, int, int, int]]:
    """The tensor, or a contiguous copy if it has no rows (`rows_of`); and its length of a row with the `Rows`."""
    rows = None if tensor.is_contiguous() else rows_of(tensor)
    if rows is None:
        return tensor.contiguous(), (1, 1, 1, 0, 0, 0)
    return tensor, (tensor.size(-1), *rows.arguments)


def _meta(tensor: Tensor, elements: int) -> dict[str, Any]:
    return {
        "FLAT": tensor.is_contiguous(),
        "EVEN": elements % FLAG_GROUP == 0,
        "BLOCK": FLAG_GROUP,
        "num_warps": _WARPS,
        "enable_fp_fusion": True,
    }
