"""Saves the smaller tensor for a tensor that repeats it, e.g. grouped keys and values repeated for each query head."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from memopt.recompute.graph import repeated_from
from memopt.recompute.rules import Node
from memopt.saved.pinned import Packed


class Once:
    """Stands for a contiguous tensor that repeats a smaller one, and holds the smaller one."""

    __slots__ = ("_packed", "_shape", "_view")

    def __init__(self, packed: Packed, shape: tuple[int, ...], tensor: Tensor) -> None:
        """`shape` is the shape of the repeated tensor, of which `tensor` is a view."""
        self._packed, self._shape = packed, shape
        self._view = tensor.size(), tensor.stride()

    def unpack(self) -> Tensor:
        return self._packed.unpack().expand(self._shape).contiguous().as_strided(*self._view)


def once_in(tensor: Tensor, base: Tensor, node: Node) -> tuple[Tensor, tuple[int, ...]] | None:
    """A copy of the smaller tensor that `tensor` (`base` or a view of all of it) repeats, and the repeated shape.

    None if `node`, which made `base`, repeated nothing, or if `tensor` was changed in place since.
    """
    found = repeated_from(node)
    if found is None or tensor._version != 0 or tensor.numel() != base.numel():
        return None
    shape, once = found
    if not base.is_contiguous() or base.storage_offset() or 2 * math.prod(once) > base.numel():
        return None
    with torch.no_grad():
        kept = base.detach().view(shape)
        for dim, (size, repeated) in enumerate(zip(once, shape, strict=True)):
            if size < repeated:
                kept = kept.narrow(dim, 0, 1)
        return kept.clone(), shape
