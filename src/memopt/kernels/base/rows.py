"""Where the rows (last dimension) of a strided tensor are: kernels read slices and transposed heads in place."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Row r of the tensor starts at element i0 * strides[0] + i1 * strides[1] + i2 * strides[2], where

        i2 = r % sizes[1],   i1 = (r // sizes[1]) % sizes[0],   i0 = r // (sizes[0] * sizes[1]).

    A tensor whose rows are evenly spaced has sizes (1, 1), and its spacing is strides[0].
    """

    count: int
    sizes: tuple[int, int]
    strides: tuple[int, int, int]

    @property
    def arguments(self) -> tuple[int, int, int, int, int]:
        """n1, n2, s0, s1, s2, as the kernels take them."""
        return (*self.sizes, *self.strides)


def rows_of(tensor: Tensor) -> Rows | None:
    """The rows of `tensor`; their order is that of the indices, as in ``tensor.reshape(-1, hidden)``.

    Returns:
        None if the elements of a row are not adjacent, or the leading dimensions do not merge into three at most.
    """
    return rows_in(tensor.shape, tensor.stride())


@functools.lru_cache(maxsize=4096)
def rows_in(shape: tuple[int, ...], stride: tuple[int, ...]) -> Rows | None:
    """:func:`rows_of` a tensor of this shape and stride."""
    if shape and shape[-1] > 1 and stride[-1] != 1:
        return None
    merged: list[tuple[int, int]] = []
    count = 1
    for size, step in zip(shape[:-1], stride[:-1], strict=True):
        count *= size
        if size == 1:
            continue
        if merged and merged[-1][1] == step * size:
            merged[-1] = (merged[-1][0] * size, step)
        else:
            merged.append((size, step))
    if len(merged) > 3:
        return None
    # Sizes of 1 are last: they merge with anything, and evenly spaced rows have their spacing in strides[0].
    (_, s0), (n1, s1), (n2, s2) = merged + [(1, 0)] * (3 - len(merged))
    return Rows(count, (n1, n2), (s0, s1, s2))


def laid_out_like(layout: Tensor, result: Tensor) -> Tensor:
    """`result` with the strides of ``torch.empty_like(layout)``; a copy if it has other strides."""
    target = torch.empty_like(layout, dtype=result.dtype)
    # Return an alias with version 0: a tensor that counts as changed in place would not be recomputed.
    return result if result.stride() == target.stride() else target.copy_(result).data
