"""Saved tensors that a scope may replace by something smaller when its module is done, each in a slot.

A saved tensor is in use until the scope's module returns, and only then can it be told what else refers to its
storage. So a scope gathers slots and settles them at its end: where only slots refer to a storage, and each can do
without it, all are replaced. If one cannot, none is, and all gradients stay exact. Tensors outside of slots may be
compressed then, too.
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


@dataclass(frozen=True)
class Packing:
    """How a slot's scope keeps tensors. Each function returns what autograd holds, and what holds the tensor in there
    (None where that may not be exchanged)."""

    whole: Callable[[Tensor], tuple[Packed, Holder | None]]
    """As it is."""
    shortest: Callable[[Tensor], tuple[Packed, Holder | None]]
    """As a handle if it can be recomputed, else as it is."""
    follow: Callable[[Tensor], Handle | None]
    """How a tensor can be recomputed, if it can."""
    keep: Callable[[Tensor], Packed]
    """For a new tensor that takes its place."""


class Slot:
    """What autograd holds in the place of a saved tensor."""

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

    def gives_way(self) -> bool:
        """Whether the tensor is not needed as it is."""
        raise NotImplementedError

    def exchange(self, together: Sequence[Slot]) -> None:
        """Hold what is kept instead. `together` are all the slots of the storage, in the order of their making."""
        raise NotImplementedError

    def stay(self) -> None:
        """The storage cannot be let go."""


def tensor_of(slot: Slot) -> Tensor:
    """The tensor of a slot that holds one."""
    assert slot.held is not None
    return slot.held.holder.tensor


def settle(references: Iterable[weakref.ref[Slot]]) -> None:
    """Exchange what can be; afterwards no slot can be exchanged any more."""
    slots = [slot for reference in references if (slot := reference()) is not None]
    for slot in slots:
        if slot.held is not None:
            slot.prepare()
    groups: dict[int, list[Slot]] = {}
    for slot in slots:
        if slot.held is not None:
            groups.setdefault(storage_id(tensor_of(slot).untyped_storage()), []).append(slot)
    for group in sorted(groups.values(), key=lambda group: max(slot.rank for slot in group)):
        if _gives_way(group):
            with torch.no_grad():
                for slot in group:
                    slot.exchange(group)
        else:
            for slot in group:
                slot.stay()
    for slot in slots:
        slot.held = None


def _gives_way(group: Sequence[Slot]) -> bool:
    """Whether nobody but these slots, which hold one storage, needs it."""
    willing = all(slot.held is not None and slot.held.is_settled and slot.gives_way() for slot in group)
    return willing and only_held_by([tensor_of(slot) for slot in group])
