"""The memory of uncomputed logits: which logits are views of it, and how it is filled; kinds of functions; and the
graph of the true logits."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memopt.patches.loss.source import Source
from memopt.torch_compat import DirectFunction, no_dispatch, storage_id

if TYPE_CHECKING:
    from memopt.patches.loss.lazy import LazyLogits


class Memory:
    """Memory that logits and all their views share, before it is allocated. A view without a graph holds this object
    instead of the logits with a graph, so that it keeps no graph alive."""

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


_READ = """
    shape dtype device layout ndim requires_grad is_leaf grad_fn is_cuda is_cpu is_mps is_xpu is_meta is_sparse
    is_quantized is_nested is_mkldnn itemsize nbytes names retains_grad output_nr _base
"""
_CALLED = """
    size dim numel nelement ndimension element_size is_floating_point is_complex is_signed is_contiguous stride
    get_device is_inference __len__ __hash__ storage_offset has_names is_same_size _is_view
"""
#: Attributes and functions that read no value.
METADATA = {getattr(Tensor, name).__get__ for name in _READ.split() if hasattr(Tensor, name)} | {
    getattr(owner, name) for name in _CALLED.split() for owner in (Tensor, torch) if hasattr(owner, name)
}

_LIKE = "empty_like full_like ones_like zeros_like rand_like randint_like randn_like"
_NEW = "new_empty new_full new_ones new_zeros"
#: Functions that read no value either, and make a tensor of the same shape, or of the same dtype and device.
FACTORIES = {getattr(torch, name) for name in _LIKE.split()} | {getattr(Tensor, name) for name in _NEW.split()}
#: Functions that take a gradient of the logits themselves.
WANT_GRADIENTS = (Tensor.register_hook, Tensor.retain_grad, torch.autograd.grad)


def waits_for_a_moment(hook: Any) -> bool:
    """Whether `hook` is a hook of FSDP2, DeepSpeed or Fabric that has to run when backward begins. FSDP2's hook gathers
    weights. Fabric's checks that backward was called through it. DeepSpeed's counts the backward pass and divides the
    gradient by the number of micro-batches; it may do so on the logits or on a result of them."""
    module = str(getattr(getattr(hook, "func", hook), "__module__", ""))
    return module.startswith(("torch.distributed.fsdp", "deepspeed.runtime", "lightning.fabric", "lightning_fabric"))


def writes(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function of PyTorch changes a tensor in place, by its name and arguments."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__") or "out" in kwargs


class RevealFunction(DirectFunction):
    """The value of logits that a foreign autograd node made; backward passes the gradient on to that node."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy, None


class AdoptFunction(DirectFunction):
    """Gives a tensor the graph of another tensor with the same value, as an operation in place does."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, other: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        ctx.is_view = type(tensor) is Tensor and tensor._is_view()
        return tensor

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # Zeros for a view: autograd takes None for a part of a tensor as None for the whole tensor.
        return torch.zeros_like(dy) if ctx.is_view else None, dy


def state_of(value: Tensor) -> tuple[Any, ...]:
    """The graph and the version of a tensor, which a change in place changes."""
    try:
        return value.requires_grad, value.grad_fn, value._version
    except RuntimeError:  # one of several views of one function; autograd refuses it after a change in place
        return False, None, value._version
