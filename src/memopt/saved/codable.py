"""What an activation keeps, as it is or as a code of the derivative: decided when the scope's module is done.

Most activations keep their input, and where somebody keeps the output, it is made again from that: the input stays and
the gradient is exact. Where nobody does (the linear behind it is frozen and has no adapter, or keeps a sample of rows),
backward needs the derivative alone, and a code of it takes the input's place. A ReLU keeps its output, which the next
linear may keep as well; where none does, one bit an element takes its place, and the gradient stays exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from memopt.saved.compression import Compressible, Packed
from memopt.saved.handles import Remade
from memopt.saved.slots import Slot, tensor_of


class Codable(Slot):
    """The slot of one activation's input or output. `pack` is a saved-tensor hook for the call that saves it."""

    __slots__ = ("_encode", "_keep", "_of_output", "_pack", "_remade", "is_coded")

    def __init__(
        self,
        encode: Callable[[Tensor], Tensor],
        pack: Callable[[Tensor], Any],
        keep: Callable[[Tensor], Packed],
        *,
        of_output: bool = False,
    ) -> None:
        super().__init__()
        self._encode, self._pack, self._keep, self._of_output = encode, pack, keep, of_output
        self._remade: Remade | None = None
        self.is_coded = False
        """Whether `unpack` gives the code."""

    def pack(self, tensor: Tensor) -> Codable:
        self.packed, holder = self._pack(tensor)
        # A leaf is somebody's, and is held itself: an alias would count its references. An output is saved detached.
        if holder is not None and (self._of_output or not tensor.is_leaf):
            self.held = Compressible(self.packed, holder, tensor)
        return self

    def read_through(self, remade: Remade) -> None:
        """`remade` counts the handles of what is made again from the tensor."""
        self._remade = remade

    def gives_way(self) -> bool:
        return self._remade is not None and not self._remade.holders

    def exchange(self, together: Sequence[Slot]) -> None:
        self.packed = self._keep(self._encode(tensor_of(self)))
        self.is_coded = True
