"""Saved tensors that a scope may replace by something smaller when its module is done, each in a slot.

A saved tensor is in use until the scope's module returns. Only then do reference counts show whether anything else
refers to its storage. So a scope gathers slots and settles them at its end. If only slots refer to a storage and each
slot can do without it, all of them replace their tensor. Otherwise none does, and all gradients stay exact. Kept
tensors outside of slots may be compressed then, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from memopt.saved.handles import Handle
from memopt.saved.pinned import Holder, Packed, only_held_by, stream_of
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
        """Whether the tensor was not written to since its save, and no other stream may still use it."""
        tensor = self.holder.tensor
        # If a copy replaced the tensor (`memopt.saved.pinned`), its own version counter starts at 0.
        version = self._version if storage_id(tensor.untyped_storage()) == self._storage else 0
        return tensor._version == version and stream_of(tensor) == self._stream

    def unpack(self) -> Tensor:
        return self.packed.unpack()


class Compressor(Protocol):
    """Gathers the tensors that one call of a scope's module keeps."""

    def saved(self, packed: Packed, holder: Holder, tensor: Tensor, needs_strides: bool) -> Packed:
        """The object to keep for `tensor`: `packed`, or one that `settle` may compress. With `needs_strides`, a
        `torch.autograd.Function` saved it and may rely on its strides."""

    def settle(self) -> None:
        """Compress every storage that only autograd refers to."""


#: Makes the compressor for one call of a scope's module, which stores the saved tensors that are not recomputed. The
#: argument is the module's input, the hidden states: their size decides which tensors are worth compressing.
Compression = Callable[[Tensor], Compressor]


@dataclass(frozen=True)
class Packing:
    """Functions by which a slot's scope keeps tensors. A pair is the object for autograd, and the holder in it of the
    tensor (None if the tensor may not be exchanged)."""

    whole: Callable[[Tensor], tuple[Packed, Holder | None]]
    """Keeps the tensor as it is."""
    shortest: Callable[[Tensor], tuple[Packed, Holder | None]]
    """Keeps a handle if the tensor can be recomputed, else the tensor as it is."""
    follow: Callable[[Tensor], Handle | None]
    """A handle of the tensor, not yet counted as a reader; None if it cannot be recomputed."""
    keep: Callable[[Tensor], Packed]
    """Keeps a new tensor that replaces the saved one."""


class Slot:
    """The object that autograd holds in the place of a saved tensor."""

    __slots__ = ("__weakref__", "held", "packed")

    packed: Packed
    held: Compressible | None
    """The tensor, while it may be exchanged."""

    def __init__(self) -> None:
        self.held = None

    def unpack(self) -> Tensor:
        return self.packed.unpack()

    #: Storages are settled in the order of the highest rank among their slots.
    rank = 1

    def prepare(self) -> None:
        """Called for every slot before the first is exchanged."""

    def is_replaceable(self) -> bool:
        """Whether a smaller form can replace the tensor."""
        raise NotImplementedError

    def exchange(self, together: Sequence[Slot]) -> None:
        """Replace the tensor. `together` are all slots of its storage, in the order in which they were made."""
        raise NotImplementedError

    def stay(self) -> None:
        """Called if the storage must be kept."""


def tensor_of(slot: Slot) -> Tensor:
    """The tensor of a slot that holds one."""
    assert slot.held is not None
    return slot.held.holder.tensor


def settle(references: Iterable[weakref.ref[Slot]]) -> None:
    """Let slots replace their tensors where a whole storage can be freed. Afterwards no slot can any more."""
    slots = [slot for reference in references if (slot := reference()) is not None]
    for slot in slots:
        if slot.held is not None:
            slot.prepare()
    groups: dict[int, list[Slot]] = {}
    for slot in slots:
        if slot.held is not None:
            groups.setdefault(storage_id(tensor_of(slot).untyped_storage()), []).append(slot)
    for group in sorted(groups.values(), key=lambda group: max(slot.rank for slot in group)):
        if _are_replaceable(group):
            with torch.no_grad():
                for slot in group:
                    slot.exchange(group)
        else:
            for slot in group:
                slot.stay()
    for slot in slots:
        slot.held = None


def _are_replaceable(group: Sequence[Slot]) -> bool:
    """Whether nothing but these slots refers to their common storage, and every slot can replace its tensor."""
    can = all(slot.held is not None and slot.held.is_settled and slot.is_replaceable() for slot in group)
    return can and only_held_by([tensor_of(slot) for slot in group])
