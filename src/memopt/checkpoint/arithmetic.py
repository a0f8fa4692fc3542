"""The arithmetic of a fold: y = (offset + gamma) * x_hat + beta feeding W, b becomes W' = W diag(offset + gamma),
b' = b + W beta.

Every stored element is the exact result rounded once, to nearest even. Products of 16- and 32-bit numbers are exact in
fp64; sums are carried as unevaluated pairs (hi, lo) of fp64 numbers, which makes the result the correctly rounded one
whatever the order and the block size. An fp64 number goes to bf16 through fp32, rounded to odd on the way (Boldo and
Melquiond, "Emulation of FMA and correctly rounded sums", IEEE TC 57(4), 2008). The product of two bf16 numbers has 16
bits, so fp32 holds it exactly down to 2^-134, half of the smallest bf16 number, below which both round to zero:
:class:`Scaler` then needs no fp64.

numpy has no bf16, so stored values are arrays of their bits: unsigned integers, with the dtype's safetensors name.
`fold` decides which tensors are folded; `shards` reads and writes files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memopt.checkpoint.tiles import Piece, tiles

Channels = Sequence[int] | None
Floats = npt.NDArray[np.float64]
Bits = npt.NDArray[Any]
"""Stored values as unsigned integers of their size."""
Pair = tuple[Floats, Floats]
#: Elements per step: a tile and its temporaries fit into the cache.
_TILE = 1 << 17
#: dtype -> (unsigned integer, its floating-point type in numpy, smallest normal number, infinity), the last two as bits
_FORMATS: dict[str, tuple[type, type, int, int]] = {
    "BF16": (np.uint16, np.uint16, 0x0080, 0x7F80),
    "F16": (np.uint16, np.float16, 0x0400, 0x7C00),
    "F32": (np.uint32, np.float32, 0x0080_0000, 0x7F80_0000),
    "F64": (np.uint64, np.float64, 0x0010_0000_0000_0000, 0x7FF0_0000_0000_0000),
}


def stored(raw: bytes | bytearray | memoryview, dtype: str) -> Bits:
    """Bytes of a file as bits; a view."""
    return np.frombuffer(raw, dtype=_FORMATS[dtype][0])


def decode(bits: Bits, dtype: str) -> Floats:
    """Stored values as fp64 numbers."""
    if dtype == "BF16":
        return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32).astype(np.float64)
    return bits.view(_FORMATS[dtype][1]).astype(np.float64)


def encode(values: Floats, dtype: str) -> Bits:
    """fp64 `values` rounded to nearest even in `dtype`, as from infinite precision."""
    with np.errstate(all="ignore"):
        if dtype != "BF16":
            return values.astype(_FORMATS[dtype][1]).view(_FORMATS[dtype][0])
        single = values.astype(np.float32)
        back = single.astype(np.float64)
        bits = single.view(np.uint32)
        bits -= np.abs(back) > np.abs(values)  # sign and magnitude: one less is one towards zero
        bits |= back != values
    return _round_to_upper_half(bits).astype(np.uint16)


def epsilon(dtype: str) -> float:
    """Distance between 1 and the next number of a dtype."""
    return 2.0**-7 if dtype == "BF16" else float(np.finfo(_FORMATS[dtype][1]).eps)


class Scaler:
    """W diag(scale), each element rounded once; `scale`: fp64, (size,) along the axis; `dtype`: of the weight."""

    def __init__(self, scale: Floats, dtype: str) -> None:
        self._dtype, self._scale = dtype, scale
        with np.errstate(all="ignore"):
            self._single = scale.astype(np.float32)
        exact = bool((self._single == scale).all()) and not (self._single.view(np.uint32) & 0xFFFF).any()
        self._in_single = dtype == "BF16" and exact

    def __call__(self, block: Bits, columns: slice, out: Bits) -> None:
        """Scale `block` (outer, size, inner), whose coordinates are `columns` of the axis, into `out`."""
        start = columns.start
        for piece in tiles(block.shape, _TILE):
            place = slice(start + piece[1].start, start + piece[1].stop)
            self._tile(block[piece], place, out[piece])

    def _tile(self, block: Bits, columns: slice, out: Bits) -> None:
        with np.errstate(all="ignore"):
            if not self._in_single:
                out[...] = encode(decode(block, self._dtype) * self._scale[None, columns, None], self._dtype)
                return
            bits = block.astype(np.uint32)
            bits <<= 16
            product = bits.view(np.float32)
            product *= self._single[None, columns, None]
            out[...] = _round_to_upper_half(bits)


def fold_scale(gamma: Floats, offset: int, size: int, channels: Channels = None) -> Floats:
    """fp64 scale of each of `size` coordinates; 1 if `channels` is negative (not this norm's)."""
    return spread(gamma.reshape(-1) + offset, size, channels, neutral=1.0)


def fold_shift(beta: Floats, scale: float, size: int, channels: Channels = None) -> Floats:
    """fp64 constant that each of `size` coordinates adds; 0 if `channels` is negative."""
    return spread(beta.reshape(-1) * scale, size, channels, neutral=0.0)


def contract(block: Bits, dtype: str, shift: Floats) -> Pair:
    """Sum over the middle dimension of `block` (outer, size, inner) times `shift` (size), as a pair (outer, inner)."""
    outer, _, inner = block.shape
    total = zero_pair(outer, inner)
    for piece in tiles(block.shape, _TILE):
        terms = decode(block[piece], dtype) * shift[None, piece[1], None]
        accumulate(total, piece, sum_pair((terms, np.zeros_like(terms)), axis=1))
    return total


def zero_pair(*shape: int) -> Pair:
    return np.zeros(shape), np.zeros(shape)


def accumulate(total: Pair, piece: Piece, part: Pair) -> None:
    """Add `part`, the sum of one tile, to the pair `total` (outer, inner) in place."""
    where = (piece[0], piece[2])
    total[0][where], total[1][where] = add_pairs((total[0][where], total[1][where]), part)


def per_output(product: Pair, count: int) -> Pair:
    """A contraction (outer, inner) as `count` sums: kernel dimensions behind the bias's own are summed."""
    return sum_pair((product[0].reshape(count, -1), product[1].reshape(count, -1)), axis=1)


def finish_bias(bias: Bits, dtype: str, product: Pair) -> Bits:
    """The flat `bias` plus the flat pair `product`, rounded once."""
    start = decode(bias, dtype)
    high, low = add_pairs(product, (start, np.zeros_like(start)))
    return encode(high if dtype == "F64" else _to_odd(high, low), dtype)


def add_pairs(a: Pair, b: Pair) -> Pair:
    """Sum of two unevaluated pairs (Knuth's two-sum, then renormalised)."""
    high = a[0] + b[0]
    image = high - a[0]
    low = (a[0] - (high - image)) + (b[0] - image) + (a[1] + b[1])
    total = high + low
    return total, low - (total - high)


def sum_pair(pair: Pair, axis: int) -> Pair:
    """Sum of pairs over `axis`, in a tree."""
    high, low = np.moveaxis(pair[0], axis, 0), np.moveaxis(pair[1], axis, 0)
    while (count := high.shape[0]) > 1:
        half = count // 2
        total = add_pairs((high[:half], low[:half]), (high[half : 2 * half], low[half : 2 * half]))
        odd = slice(2 * half, count)
        high, low = np.concatenate([total[0], high[odd]]), np.concatenate([total[1], low[odd]])
    return high[0], low[0]


@dataclass
class RangeChanges:
    """How many elements of folded tensors left the normal range of their dtype."""

    infinities: int = 0
    zeros: int = 0
    subnormals: int = 0

    def count(self, before: Bits, after: Bits, dtype: str) -> None:
        """Add the elements that left the normal range from `before` to `after`."""
        tiny, infinity = _FORMATS[dtype][2:]
        magnitude = after.dtype.type(np.iinfo(after.dtype).max >> 1)
        size = after & magnitude
        if size.min() >= tiny and size.max() < infinity:
            return
        origin = before & magnitude
        self.infinities += int(((size >= infinity) & (origin < infinity)).sum())
        self.zeros += int(((size == 0) & (origin != 0)).sum())
        self.subnormals += int(((size != 0) & (size < tiny) & (origin >= tiny)).sum())


def _round_to_upper_half(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """The upper 16 bits of fp32 numbers, rounded to nearest even, in place of `bits`."""
    odd = bits >> 16
    odd &= 1
    bits += odd
    bits += 0x7FFF  # a carry out of the largest finite number makes an infinity; one out of a NaN cannot occur
    bits >>= 16
    return bits


def spread(values: Floats, size: int, channels: Channels, *, neutral: float) -> Floats:
    """`values` of the norm's channels at the `size` coordinates that read them; `neutral` at the others."""
    if channels is None:
        return values
    spread = np.full(size, neutral)
    index = np.asarray(channels)
    spread[index >= 0] = values[index[index >= 0]]
    return spread


def _to_odd(high: Floats, low: Floats) -> Floats:
    """The pair rounded to odd, as one fp64 number: a later rounding then mistakes no value for a tie."""
    inexact = (low != 0) & np.isfinite(high)
    bits: npt.NDArray[np.int64] = high.view(np.int64) - (inexact & (np.signbit(low) != np.signbit(high)))
    bits[inexact] |= 1
    return bits.view(np.float64)
