"""An activation's input, kept as it is or as a code of the derivative: decided when the scope's module is done.

Where somebody keeps the activation's output, it is made again from its input, so the input stays and the gradient is
exact. Where nobody does (the linear behind it is frozen, and has no adapter), backward needs the derivative alone, and
a code of it takes the input's place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memopt.saved.compression import Compressible, Packed
from memopt.saved.handles import Remade
from memopt.saved.pinned import Holder, only_held_by


class Codable:
    """The slot of one activation's input. `pack` is a saved-tensor hook for the call that saves it."""

    __slots__ = ("__weakref__", "_encode", "_holder", "_keep", "_pack", "_remade", "is_coded", "packed")

    def __init__(
        self, encode: Callable[[Tensor], Tensor], pack: Callable[[Tensor], Any], keep: Callable[[Tensor], Packed]
    ) -> None:
        self._encode, self._pack, self._keep = encode, pack, keep
        self._holder: Compressible | None = None
        self._remade: Remade | None = None
        self.packed: Packed
        self.is_coded = False

    def pack(self, tensor: Tensor) -> Codable:
        self.packed, holder = self._pack(tensor)
        # A leaf is somebody's, and is held itself: an alias would count its references.
        if holder is not None and not tensor.is_leaf:
            self._holder = Compressible(self.packed, holder, tensor)
        return self

    def unpack(self) -> Tensor:
        """The input or, once `is_coded`, the code."""
        return self.packed.unpack()

    def read_through(self, remade: Remade) -> None:
        """`remade` counts the handles of the activation's output."""
        self._remade = remade

    def settle(self) -> None:
        """Keep the code, if no handle needs the input and nobody else keeps it."""
        held, self._holder = self._holder, None
        if held is None or self._remade is None or self._remade.holders or not held.is_settled:
            return
        holder: Holder = held.holder
        if only_held_by([holder.tensor]):
            with torch.no_grad():
                self.packed = self._keep(self._encode(holder.tensor))
            self.is_coded = True
