"""Views that hold on to a much larger storage: the values alone of a fused query-key-value projection, say.

A saved view keeps the whole storage behind it alive. Where rotary embeddings compute new queries and keys of a fused
projection, the view that attention saves, the values, pins all three. Once only autograd refers to such a storage, the
saved views are copied and the storage is freed: same values, same order of strides, less memory.

Operations of PyTorch itself take any strides. A `torch.autograd.Function` (a compiled region, somebody's kernel) may
count on those that it saved, so what such a function keeps is left as it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from memopt.torch_compat import FakeTensor, storage_id, storage_use_count

#: What is copied has to be at most this part of its storage.
LARGEST_PART = 0.75
#: Storages that are watched at a time; the oldest is forgotten. One layer has one or two of them.
WATCHED = 8


class Packed(Protocol):
    """What a pack hook returns."""

    def unpack(self) -> Tensor: ...


class Holder(Protocol):
    """What autograd holds in the place of a saved tensor; can be weakly referenced."""

    tensor: Tensor
    """An alias of the saved tensor that only the holder refers to."""

    def keep(self, tensor: Tensor) -> None:
        """Hold `tensor`, which has the same values, instead."""

    def instead(self, tensor: Tensor) -> Packed:
        """Holds `tensor`, which has other values, in the place of this one."""


@dataclass
class _Watched:
    nbytes: int
    stream: object
    """The stream that the views were made on: nothing says that another one may read them yet."""
    holders: list[tuple[weakref.ref[Any], int]] = field(default_factory=list)
    """With the version of the tensor when it was saved."""

    def living(self) -> Iterator[tuple[Holder, int]]:
        for reference, version in self.holders:
            holder = reference()
            if holder is not None:
                yield holder, version


class PinnedStorages:
    """Storages of which autograd keeps small views; `settle` copies the views where that frees the storage."""

    __slots__ = ("_watched", "has_copied")

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self.has_copied = False
        """Whether any view was copied."""

    def wants(self, tensor: Tensor) -> bool:
        """Whether `saved` has anything to do for `tensor`, not a leaf, as PyTorch's own operations save it."""
        if self._watched:
            return True
        if tensor.layout is not torch.strided:
            return False
        return tensor.numel() * tensor.element_size() <= LARGEST_PART * tensor.untyped_storage().nbytes()

    def saved(self, holder: Holder, tensor: Tensor) -> None:
        """Note that `holder` holds `tensor` for backward, and settle what other storages wait for.

        What a `torch.autograd.Function` saves must not come here.
        """
        if tensor.is_leaf or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        address, nbytes = storage_id(storage), storage.nbytes()
        if self._watched and (len(self._watched) > 1 or address not in self._watched):
            self.settle(but=address)
        if tensor.numel() * tensor.element_size() > LARGEST_PART * nbytes:
            return
        watched, stream = self._watched.get(address), stream_of(tensor)
        if watched is None or (watched.nbytes, watched.stream) != (nbytes, stream):
            watched = self._watched[address] = _Watched(nbytes, stream)
            if len(self._watched) > WATCHED:
                del self._watched[next(iter(self._watched))]
        watched.holders.append((weakref.ref(holder), tensor._version))

    def settle(self, but: int = 0) -> None:
        """Copy the views of every watched storage that nothing else refers to any more, except the one at `but`."""
        for address in [address for address in self._watched if address != but]:
            if self._is_settled(address, self._watched[address]):
                del self._watched[address]

    def _is_settled(self, address: int, watched: _Watched) -> bool:
        """Whether the storage at `address` needs no more watching; its views may have been copied."""
        holders = list(watched.living())
        if not holders:
            return True
        first = holders[0][0].tensor
        if storage_id(first.untyped_storage()) != address:
            return True
        if not only_held_by([holder.tensor for holder, _ in holders]) or stream_of(first) != watched.stream:
            return False
        views = {_view(holder.tensor): holder.tensor for holder, _ in holders}
        nbytes = sum(view.numel() * view.element_size() for view in views.values())
        # What was changed in place must still be found out by whoever holds it.
        unchanged = all(holder.tensor._version == version for holder, version in holders)
        if unchanged and nbytes <= LARGEST_PART * first.untyped_storage().nbytes():
            self.has_copied = True
            with torch.no_grad():
                copies = {key: view.clone() for key, view in views.items()}
            for holder, _ in holders:
                holder.keep(copies[_view(holder.tensor)].detach())
        return True


def only_held_by(aliases: Sequence[Tensor]) -> bool:
    """Whether nobody but `aliases`, one for each holder, refers to their storage; False where none can tell."""
    storage = aliases[0].untyped_storage()  # one reference more
    return storage_use_count(storage_id(storage)) <= 1 + len(aliases)


def stream_of(tensor: Tensor) -> object:
    """The stream that work on `tensor` is put on now; None where there are none."""
    if tensor.device.type in ("cpu", "meta") or isinstance(tensor, FakeTensor):
        return None
    return torch.accelerator.current_stream(tensor.device)


def _view(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
