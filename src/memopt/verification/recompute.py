"""Computes the expected value of a folded tensor in another way than `memopt.checkpoint`.

It rounds with torch or by scaling to integers, where `memopt.checkpoint` rounds on the bits or to odd. It sums
sequentially, not in a tree. So an error in either computation shows as a difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memopt.checkpoint.fold import Fill, Operation, Scale, Shift
from memopt.checkpoint.sources.source import CheckpointSource
from memopt.checkpoint.tiles import Piece, pieces, view3

Floats = npt.NDArray[np.float64]
Bits = npt.NDArray[np.int16]
#: Bytes of a block: few where every element needs many temporaries, more where Python loops over the columns.
_SCALE_BLOCK = 1 << 18
_SUM_BLOCK = 4 << 20
#: dtype -> (bits of precision, exponent of the smallest normal number, largest finite number)
_FORMATS = {
    "BF16": (8, -126, float(2**128 - 2**120)),
    "F16": (11, -14, 65504.0),
    "F32": (24, -126, float(2**128 - 2**104)),
    "F64": (53, -1022, float(np.finfo(np.float64).max)),
}


@dataclass
class TensorComparison:
    """Counts from the comparison of a stored tensor with its expected value."""

    elements: int = 0
    different: int = 0
    infinities: int = 0
    """Elements that were finite in the source and are not now."""
    zeros: int = 0
    subnormals: int = 0

    def __add__(self, other: TensorComparison) -> TensorComparison:
        return TensorComparison(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


class Comparison:
    """Compares a stored tensor with `operation` on the source's tensor (None: with its bytes), block by block."""

    def __init__(self, source: CheckpointSource, name: str, operation: Operation | None) -> None:
        info = source.tensors[name]
        self.result = TensorComparison()
        self._dtype, self._operation = info.dtype, operation
        if operation is None:
            self._shape, self._itemsize = (1, info.nbytes, 1), 1
            return
        self._shape = view3(info.shape or (1,), operation.axis if isinstance(operation, Scale) else 0)
        self._itemsize = info.nbytes // max(prod(self._shape), 1)
        if isinstance(operation, Scale):
            self._scale = _scale(source, operation, self._shape[1])
            self._bf16 = torch.from_numpy(self._scale).bfloat16()
            self._is_bf16 = info.dtype == "BF16" and np.array_equal(self._bf16.double().numpy(), self._scale)
        elif isinstance(operation, Shift):
            self._shifted = _shifted(source, name, _read(source, name), operation)

    def pieces(self, block: int) -> Iterator[tuple[Piece, int, int]]:
        """(slices, first byte, end) of consecutive blocks to give to `add`."""
        return pieces(self._shape, self._itemsize, block)

    def add(self, piece: Piece, start: int, before: memoryview, after: memoryview) -> None:
        """Compare one block of the source's and of the patched tensor."""
        if self._operation is None:
            word = np.uint8 if len(before) % 8 else np.uint64
            same = np.array_equal(np.frombuffer(before, word), np.frombuffer(after, word))
            self.result.different += not same
            return
        extent = (piece[0].stop - piece[0].start, piece[1].stop - piece[1].start, piece[2].stop - piece[2].start)
        for tile, first, end in pieces(extent, self._itemsize, _SCALE_BLOCK):
            columns = slice(piece[1].start + tile[1].start, piece[1].start + tile[1].stop)
            shape = [part.stop - part.start for part in tile]
            self.result.elements += prod(shape)
            if isinstance(self._operation, Scale) and self._is_bf16:
                stored, found = (np.frombuffer(view[first:end], np.int16).reshape(shape) for view in (before, after))
                if is_rounded_product(stored, found, self._bf16[None, columns, None]):
                    continue
            old, new = (decode(view[first:end], self._dtype).reshape(shape) for view in (before, after))
            if isinstance(self._operation, Fill):
                expected = np.full_like(new, self._operation.value)
            elif isinstance(self._operation, Shift):
                place = (start + first) // self._itemsize
                expected = self._shifted[place : place + new.size].reshape(shape)
            else:
                with np.errstate(over="ignore", invalid="ignore"):
                    expected = round_product(old * self._scale[None, columns, None], self._dtype)
            self._count(old, new, expected)

    def _count(self, before: Floats, after: Floats, expected: Floats) -> None:
        if not np.array_equal(after.view(np.int64), expected.view(np.int64)):
            same = (after == expected) & (np.signbit(after) == np.signbit(expected))
            self.result.different += int((~(same | (np.isnan(after) & np.isnan(expected)))).sum())
        smallest, size = 2.0 ** _FORMATS[self._dtype][1], np.abs(after)
        if isinstance(self._operation, Fill) or (size.min() >= smallest and size.max() < np.inf):
            return
        self.result.infinities += int((~np.isfinite(after) & np.isfinite(before)).sum())
        self.result.zeros += int(((size == 0) & (before != 0)).sum())
        self.result.subnormals += int(((size != 0) & (size < smallest) & (np.abs(before) >= smallest)).sum())


def is_rounded_product(before: Bits, after: Bits, scale: Tensor) -> bool:
    """Whether the bf16 numbers `after` are normal, and each is the nearest to `before` * `scale`, ties to even. The
    product of two bf16 numbers is exact in fp32 there, and torch rounds it once."""
    product = torch.from_numpy(before).view(torch.bfloat16) * scale
    if not np.array_equal(product.view(torch.int16).numpy(), after):
        return False
    size = after & 0x7FFF
    return bool(size.min() >= 0x0080 and size.max() < 0x7F80)


def round_product(values: Floats, dtype: str) -> Floats:
    """`values` rounded to nearest even in `dtype`. Adding 1.5 * 2^52 quanta of the target format rounds, because fp64
    has no bits below one quantum at that size."""
    if dtype == "F64":
        return values
    precision, smallest, largest = _FORMATS[dtype]
    exponent = (values.view(np.int64) >> 52) & 0x7FF
    np.clip(exponent, smallest + 1023, -smallest + 1 + 1024, out=exponent)
    shift = (((exponent + (53 - precision)) << 52) | (1 << 51)).view(np.float64)
    rounded = (values + shift) - shift
    big = np.abs(rounded) > largest
    if big.any():
        rounded[big] = np.copysign(np.inf, rounded[big])
    return np.copysign(rounded, values, out=rounded)


def round_sum(high: Floats, low: Floats, dtype: str) -> Floats:
    """`high` + `low` rounded to nearest even in `dtype`, where `low` is below the last bit of `high`."""
    if dtype == "F64":
        return high
    precision, smallest, largest = _FORMATS[dtype]
    with np.errstate(invalid="ignore", over="ignore"):
        quantum = np.ldexp(1.0, np.maximum(np.frexp(high)[1] - 1, smallest) - (precision - 1))
        steps = high / quantum  # exact: the quantum is a power of two
        below = np.floor(steps)
        rest = steps - below
        odd = np.remainder(below, 2) == 1
        up = (rest > 0.5) | ((rest == 0.5) & ((low > 0) | ((low == 0) & odd)))
        rounded = np.copysign((below + up) * quantum, high)
        rounded = np.where(np.abs(rounded) > largest, np.copysign(np.inf, high), rounded)
    return np.where(np.isfinite(high), rounded, high)


def decode(raw: bytes | bytearray | memoryview, dtype: str) -> Floats:
    """Stored bytes as fp64 numbers."""
    if dtype == "BF16":
        bits = np.frombuffer(raw, dtype="<u2").astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64)
    kinds: dict[str, Any] = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
    return np.frombuffer(raw, dtype=kinds[dtype]).astype(np.float64)


def _scale(source: CheckpointSource, operation: Scale, size: int) -> Floats:
    scale = np.ones(size)
    for part in operation.parts:
        gamma = _read(source, part.gamma) + part.offset
        if part.channels is None:
            scale *= gamma
        else:
            for coordinate, channel in enumerate(part.channels):
                scale[coordinate] *= gamma[channel] if channel >= 0 else 1.0
    return scale


def _shifted(source: CheckpointSource, name: str, bias: Floats, operation: Shift) -> Floats:
    high, low = bias.copy(), np.zeros_like(bias)
    for part in operation.parts:
        info = source.tensors[part.weight]
        shape = view3(info.shape, part.axis)
        beta = _read(source, part.beta) * part.scale
        channels = np.arange(shape[1]) if part.channels is None else np.asarray(part.channels)
        sums = np.zeros((2, shape[0], shape[2]))
        for piece, start, stop in pieces(shape, info.nbytes // max(prod(shape), 1), _SUM_BLOCK):
            extent = tuple(part.stop - part.start for part in piece)
            weight = decode(source.read_range(part.weight, start, stop), info.dtype).reshape(extent)
            total = sums[:, piece[0], piece[2]]
            columns = np.ascontiguousarray(weight.swapaxes(0, 1))
            for column, channel in zip(columns, channels[piece[1]], strict=True):
                if channel >= 0:
                    total[:] = _two_sum(total, column * beta[channel])
        for column in sums.reshape(2, bias.size, -1).transpose(2, 0, 1):
            high, low = _two_sum((high, low), column[0])
            low = low + column[1]
    total_high = high + low
    return round_sum(total_high, low - (total_high - high), source.tensors[name].dtype)


def _two_sum(total: Any, term: Floats) -> tuple[Floats, Floats]:
    """(high, low) plus a number; the rounding error of the addition is added to the low part."""
    high, low = total
    result = high + term
    image = result - high
    return result, low + ((high - (result - image)) + (term - image))


def _read(source: CheckpointSource, name: str) -> Floats:
    return decode(source.read_range(name), source.tensors[name].dtype)
