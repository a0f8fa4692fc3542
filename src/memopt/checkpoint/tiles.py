"""Cutting a tensor into contiguous pieces around one of its axes. Index arithmetic only, no tensors."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

Piece = tuple[slice, slice, slice]


def view3(shape: tuple[int, ...], axis: int) -> tuple[int, int, int]:
    """`shape` as three sizes: dimensions before `axis` merged, `axis`, dimensions after it merged."""
    return prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])


def pieces(shape: tuple[int, ...], itemsize: int, block: int) -> Iterator[tuple[Piece, int, int]]:
    """(slices, first byte, end) of consecutive pieces of at most `block` bytes of a contiguous 3-D array."""
    start = 0
    for piece in tiles(shape, block // max(itemsize, 1)):
        stop = start + prod(part.stop - part.start for part in piece) * itemsize
        yield piece, start, stop
        start = stop


def tiles(shape: tuple[int, ...], limit: int) -> Iterator[Piece]:
    """Cut a contiguous 3-D array into contiguous pieces of at most `limit` elements, in order."""
    outer, size, inner = shape
    if 0 in shape:
        return
    if size * inner <= limit:
        step = limit // (size * inner)
        for row in range(0, outer, step):
            yield slice(row, min(row + step, outer)), slice(0, size), slice(0, inner)
        return
    steps = (max(limit // inner, 1), min(inner, limit))
    for row in range(outer):
        for column in range(0, size, steps[0]):
            for place in range(0, inner, steps[1]):
                yield (
                    slice(row, row + 1),
                    slice(column, min(column + steps[0], size)),
                    slice(place, min(place + steps[1], inner)),
                )
