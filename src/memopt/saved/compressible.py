"""Saved tensors that may be replaced when their scope's module is done, and what a compression of them has to offer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from memopt.saved.pinned import Holder, Packed, stream_of
from memopt.torch_compat import storage_id


class Compressible:
    """A kept tensor that may be replaced by a compressed one."""

    __slots__ = ("__weakref__", "_storage", "_stream", "_version", "holder", "needs_strides", "packed")

    def __init__(self, packed: Packed, holder: Holder, tensor: Tensor, needs_strides: bool = False) -> None:
        self.packed, self.holder, self.needs_strides = packed, holder, needs_strides
        self._version, self._stream = tensor._version, stream_of(tensor)
        self._storage = storage_id(tensor.untyped_storage())

    @property
    def is_settled(self) -> bool:
        """Whether nothing was written into the tensor since, and no other stream may still use it."""
        tensor = self.holder.tensor
        # A copy in its place (`memopt.saved.pinned`) counts its own changes.
        version = self._version if storage_id(tensor.untyped_storage()) == self._storage else 0
        return tensor._version == version and stream_of(tensor) == self._stream

    def unpack(self) -> Tensor:
        return self.packed.unpack()


class Compressor(Protocol):
    """Gathers what one call of a scope's module keeps."""

    def saved(self, packed: Packed, holder: Holder, tensor: Tensor, needs_strides: bool) -> Packed:
        """What to keep for `tensor`: `packed`, or something that `settle` may compress.

        With `needs_strides` whoever saved it may count on its strides; operations of PyTorch itself do not.
        """

    def settle(self) -> None:
        """Compress every storage that only autograd refers to."""


#: How a scope stores the saved tensors that are not recomputed: makes the compressor of one call from the hidden states
#: that the module is given, whose size tells what is worth compressing.
Compression = Callable[[Tensor], Compressor]
