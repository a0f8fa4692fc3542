"""Saved views that keep a much larger storage alive, e.g. only the values of a fused query-key-value projection.

A saved view keeps the whole storage behind it alive. With rotary embeddings, attention saves new queries and keys and
a view of the fused projection, the values: this view keeps all three alive. Once only autograd refers to such a
storage, the saved views are copied and the storage is freed: same values, same order of strides, less memory.

Operations of PyTorch itself take any strides. A `torch.autograd.Function` (a compiled region, a custom kernel) may rely
on the strides of its saved tensors, so its saved tensors are never copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from memopt.torch_compat import FakeTensor, storage_id, storage_use_count

#: The copied views must take at most this part of their storage.
LARGEST_PART = 0.75
#: Most storages that are watched at a time; the oldest is dropped. One layer has one or two of them.
WATCHED = 8


class Packed(Protocol):
    """The result of a pack hook."""

    def unpack(self) -> Tensor: ...


class Holder(Protocol):
    """An object that autograd holds in the place of a saved tensor; it can be weakly referenced."""

    tensor: Tensor
    """An alias of the saved tensor that only the holder refers to."""

    def keep(self, tensor: Tensor) -> None:
        """Hold `tensor`, which has the same values, instead."""

    def instead(self, tensor: Tensor) -> Packed:
        """A new holder of `tensor`, which has other values and replaces this holder's tensor."""


@dataclass
class _Watched:
    nbytes: int
    stream: object
    """The stream on which the views were made: a copy on another stream would not be ordered after their kernels."""
    holders: list[tuple[weakref.ref[Any], int]] = field(default_factory=list)
    """Holders, each with the version of its tensor at the save."""

    def living(self) -> Iterator[tuple[Holder, int]]:
        for reference, version in self.holders:
            holder = reference()
            if holder is not None:
                yield holder, version


class PinnedStorages:
    """Storages of which autograd keeps small views; `settle` copies the views if that frees the storage."""

    __slots__ = ("_watched", "has_copied")

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self.has_copied = False
        """Whether any view was copied."""

    def applies_to(self, tensor: Tensor) -> bool:
        """Whether `saved` has work to do for `tensor`, which is no leaf and saved by an operation of PyTorch."""
        if self._watched:
            return True
        if tensor.layout is not torch.strided:
            return False
        return tensor.numel() * tensor.element_size() <= LARGEST_PART * tensor.untyped_storage().nbytes()

    def saved(self, holder: Holder, tensor: Tensor) -> None:
        """Note that `holder` holds `tensor` for backward, and settle other watched storages. Never call it for a tensor
        that a `torch.autograd.Function` saves."""
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
        # A holder must still detect that its tensor was changed in place: a copy would hide that.
        unchanged = all(holder.tensor._version == version for holder, version in holders)
        if unchanged and nbytes <= LARGEST_PART * first.untyped_storage().nbytes():
            self.has_copied = True
            with torch.no_grad():
                copies = {key: view.clone() for key, view in views.items()}
            for holder, _ in holders:
                holder.keep(copies[_view(holder.tensor)].detach())
        return True


def only_held_by(aliases: Sequence[Tensor]) -> bool:
    """Whether only `aliases`, one for each holder, refer to their storage; False if reference counts are missing."""
    storage = aliases[0].untyped_storage()  # one reference more
    return storage_use_count(storage_id(storage)) <= 1 + len(aliases)


def stream_of(tensor: Tensor) -> object:
    """The current stream of the device of `tensor`; None for CPU, meta and fake tensors."""
    if tensor.device.type in ("cpu", "meta") or isinstance(tensor, FakeTensor):
        return None
    return torch.accelerator.current_stream(tensor.device)


def _view(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
