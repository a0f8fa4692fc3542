"""The memory of uncomputed logits: which logits are views of it, and how it is filled."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memopt.patches.loss.source import Source
from memopt.torch_compat import no_dispatch, storage_id

if TYPE_CHECKING:
    from memopt.patches.loss.lazy import LazyLogits


class Memory:
    """Memory that logits and all their views share, before it is allocated.

    A view without a graph holds this object instead of the logits with a graph, so that it keeps no graph alive.
    """

    def __init__(self, owner: LazyLogits) -> None:
        self.owner = weakref.ref(owner)
        self.source: Source | None = None
        self.step: Callable[[], Tensor] | None = None
        self.origin: Memory | None = None
        self.data: Tensor | None = None

    def settle(self) -> None:
        """Keep the owner's source without its graph, to fill this memory after the owner is gone."""
        owner = self.owner()
        if self.source is None and owner is not None:
            self.source = dataclasses.replace(owner.source, tracked=False, x=owner.source.x.detach())

    @property
    def is_alive(self) -> bool:
        """Whether this memory is filled or its owner is alive, or the memory that it is computed from `is_alive`."""
        alive = self.owner() is not None or self.data is not None
        return alive or (self.origin is not None and self.origin.is_alive)

    def view(self, form: Tensor) -> Tensor:
        """The part with the layout of `form`, of the owner's true logits; without a graph if the owner is gone."""
        owner = self.owner()
        if owner is None and self.data is None:
            if self.step is not None and self.origin is not None and self.origin.is_alive:
                self.data = self.step()
            else:
                assert self.source is not None
                self.data = self.source.whole()
        whole = self.data if owner is None else owner.fill()
        assert whole is not None
        return whole.as_strided(form.shape, form.stride(), form.storage_offset())


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share memory."""
    return storage_id(one.untyped_storage()) == storage_id(other.untyped_storage())


def empty(shape: Sequence[int], like: Tensor | None = None) -> Tensor:
    """A form (meta tensor): contiguous of `shape`, or of a copy of a tensor with the form `like`."""
    with no_dispatch():
        return torch.empty(shape, device="meta") if like is None else torch.empty_like(like)
