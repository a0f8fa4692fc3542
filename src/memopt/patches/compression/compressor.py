"""Quantise saved tensors that are not recomputed, as soon as only autograd refers to them.

A module's code may read a saved tensor until the module returns. So references are checked whenever another tensor is
saved, and when the scope's module returns. Each storage is quantised once, however many operations saved a view of it,
and decoded once for all operations that unpack it at the same time. If the views leave gaps in their storage, whose
memory may never have been written, each view is quantised by itself. A tensor that is recomputed is a handle already;
it is computed from the decoded tensors.

Small tensors are not quantised: statistics of rows (rstd, the logsumexp of attention) take few bytes, and their errors
would be multiplied.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from memopt.kernels.base.counter import draw_seed
from memopt.kernels.quantize.layout import Quantized
from memopt.kernels.quantize.quantize import dequantize, quantize
from memopt.saved.pinned import Holder, Packed, only_held_by
from memopt.saved.slots import Compressible
from memopt.torch_compat import FakeTensor, living_storage, storage_id, weak_storage

#: A 16-bit tensor with fewer than LEAST_WIDTH elements a token is not quantised. Nor is a wider tensor with fewer than
#: 1 / LEAST_PART of the elements of the hidden states, because statistics have 32 bits.
LEAST_WIDTH = 32
LEAST_PART = 4


#: (elements of a storage; size, strides and offset of a tensor in it) -> function to call with the decoded tensor.
Observer = Callable[[Tensor, tuple[Any, ...]], Callable[[Tensor], None]]


class Compressor:
    """Collects the saved tensors of a scope; `settle` compresses them. Seeds are drawn from torch's default CPU
    generator. `hidden` is the input of the scope's module; its last dimension is the hidden size."""

    observers: ClassVar[list[Observer]] = []
    """Called for each saved tensor whose storage was quantised."""

    def __init__(self, hidden: Tensor) -> None:
        self._tokens = max(1, hidden.numel() // max(1, hidden.shape[-1] if hidden.dim() else 1))
        self._narrow = hidden.numel() // LEAST_PART
        self._kept: list[weakref.ref[Compressible]] = []

    def saved(self, packed: Packed, holder: Holder, tensor: Tensor, needs_strides: bool) -> Packed:
        """The object to keep for `tensor`: `packed`, or a `Compressible` that may be compressed later. With
        `needs_strides`, the function that saved it may rely on its strides; PyTorch's own operations never do."""
        if not self._is_worth_it(tensor):
            return packed
        compressible = Compressible(packed, holder, tensor, needs_strides)
        self._settle(but=storage_id(tensor.untyped_storage()))
        self._kept.append(weakref.ref(compressible))
        return compressible

    def settle(self) -> None:
        """Compress every storage that only autograd refers to; the others stay as they are."""
        self._settle()
        self._kept.clear()

    def _settle(self, but: int = 0) -> None:
        """Compress every storage that only autograd refers to, except the storage `but`; the others wait."""
        groups: dict[int, list[Compressible]] = {}
        for reference in self._kept:
            compressible = reference()
            if compressible is not None:
                groups.setdefault(storage_id(compressible.holder.tensor.untyped_storage()), []).append(compressible)
        self._kept = []
        for storage, group in groups.items():
            dtypes = {member.holder.tensor.dtype for member in group}
            settled = storage != but and all(member.is_settled for member in group)
            if len(dtypes) == 1 and settled and only_held_by([member.holder.tensor for member in group]):
                with torch.no_grad():
                    self._compress(group)
            else:
                self._kept += map(weakref.ref, group)

    def _compress(self, group: list[Compressible]) -> None:
        whole = next((member.holder.tensor for member in group if _fills_its_storage(member.holder.tensor)), None)
        if whole is not None:
            elements = whole.as_strided((whole.numel(),), (1,), 0)
            stored = _Stored(quantize(elements, draw_seed()))
            for member in group:
                tensor = member.holder.tensor
                self._replace(member, stored, elements, tensor.size(), tensor.stride(), tensor.storage_offset())
            return
        if any(member.needs_strides or 0 in member.holder.tensor.stride() for member in group):
            return  # one of them needs the storage as it is, so none is compressed
        views: dict[Any, tuple[_Stored, Tensor]] = {}
        for member in group:
            tensor = member.holder.tensor
            dense = torch.empty_like(tensor).stride()
            key = (tensor.storage_offset(), tensor.size(), tensor.stride())
            if key not in views:
                in_order = torch.empty_strided(tensor.size(), dense, dtype=tensor.dtype, device=tensor.device)
                elements = in_order.copy_(tensor).as_strided((tensor.numel(),), (1,), 0)
                views[key] = _Stored(quantize(elements, draw_seed())), elements
            self._replace(member, *views[key], tensor.size(), dense, 0)

    @classmethod
    def _replace(cls, member: Compressible, stored: _Stored, elements: Tensor, *view: Any) -> None:
        stored.kept_in_the_place_of(member.holder)
        member.packed = _View(stored, view, [observer(elements, view) for observer in cls.observers])
        del member.holder

    def _is_worth_it(self, tensor: Tensor) -> bool:
        if type(tensor) not in (Tensor, FakeTensor) or isinstance(tensor, nn.Parameter):
            return False
        if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.element_size() < 2:
            return False
        if tensor.is_leaf and tensor.requires_grad:
            return False
        least = self._tokens * LEAST_WIDTH if tensor.element_size() == 2 else self._narrow
        elements = min(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.element_size())  # it may be expanded
        return elements >= max(1, least)


def _fills_its_storage(tensor: Tensor) -> bool:
    """Whether `tensor` has every element of its storage, each once."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.numel() == reach and reach * tensor.element_size() == tensor.untyped_storage().nbytes()


class _Stored:
    """A compressed storage. Tensors that are in use at the same time share its decoded values, and alone own them."""

    __slots__ = ("_held", "_quantized", "_values")

    def __init__(self, quantized: Quantized) -> None:
        self._quantized = quantized
        self._held: list[Packed] = []
        self._values: Any = None

    def kept_in_the_place_of(self, holder: Holder) -> None:
        self._held += map(holder.instead, (self._quantized.codes, self._quantized.scales))

    def values(self) -> Tensor:
        if self._values is not None:
            storage = living_storage(self._values)
            if storage is not None:
                like = self._quantized
                return torch.empty(0, dtype=like.dtype, device=like.codes.device).set_(storage)
        with torch.no_grad():
            values = dequantize(self._quantized)
        self._values = weak_storage(values.untyped_storage())
        return values


class _View:
    """One kept tensor inside a compressed storage."""

    __slots__ = ("_observers", "_stored", "_view")

    def __init__(self, stored: _Stored, view: tuple[Any, ...], observers: Sequence[Callable[[Tensor], None]]) -> None:
        self._stored, self._view, self._observers = stored, view, observers

    def unpack(self) -> Tensor:
        decoded = self._stored.values().as_strided(*self._view)
        for observer in self._observers:
            observer(decoded)
        return decoded
