"""The base of the operators' autograd functions: autocast, double backward, memory that a backward may write over."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from memopt.torch_compat import (
    any_autocast_enabled,
    checkpointing_hook,
    current_graph_task_id,
    is_legacy_batched,
    is_transformed,
    storage_id,
    storage_use_count,
)

R = TypeVar("R")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and sums of tensors of `dtype`: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def refuse_double_backward() -> None:
    """Call it first in a backward that is not itself differentiable.

    `torch.autograd.function.once_differentiable` raises only where the incoming gradient has a graph, and otherwise
    loses the second derivative silently.

    Raises:
        RuntimeError: backward runs with ``create_graph=True``.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "memopt's operators have no second derivative, so backward cannot run with create_graph=True. "
            "Call memopt.unpatch(model) first."
        )


def is_batched(gradients: Sequence[Tensor]) -> bool:
    """Whether a gradient stands for a batch of gradients (``is_grads_batched``, `torch.vmap`): results computed from it
    do not fit into tensors that an operator allocates."""
    return any(is_legacy_batched(each) or is_transformed(each) for each in gradients)


def as_leaf(tensor: Tensor) -> Tensor:
    """`tensor` without its graph. A parameter, since function transforms refuse ``requires_grad_``."""
    return nn.Parameter(tensor.detach(), tensor.requires_grad)


def batched_gradients(
    results: Sequence[Tensor], inputs: Sequence[Tensor | None], gradients: Sequence[Tensor]
) -> list[Tensor | None]:
    """Autograd's gradients of `inputs`, from batched `gradients` of `results`; None for inputs that require none."""
    outputs, incoming = zip(
        *((y, dy) for y, dy in zip(results, gradients, strict=True) if y.requires_grad), strict=True
    )
    wanted = [each for each in inputs if each is not None and each.requires_grad]
    found = iter(torch.autograd.grad(outputs, wanted, incoming, allow_unused=True))
    return [next(found) if each is not None and each.requires_grad else None for each in inputs]


def are_from_checkpoint() -> bool:
    """Whether PyTorch's activation checkpointing keeps the tensors that are saved now: backward then gets recomputed
    tensors, each only once."""
    return checkpointing_hook() is not None


def may_be_overwritten(*tensors: Tensor) -> bool:
    """Whether nothing else can read the memory of these saved tensors, for which :func:`are_from_checkpoint` was true.

    A forward hook may hold one, or a second reader may have saved an alias: both refer to the storage.
    """
    return all(_is_alone(tensor) for tensor in tensors)


def _is_alone(tensor: Tensor) -> bool:
    storage = tensor.untyped_storage()  # adds one reference
    return tensor.is_contiguous() and storage_use_count(storage_id(storage)) <= 2


class _Backward(threading.local):
    """This thread's current backward, and the size of the largest tensor that :func:`is_largest_yet` got in it."""

    task, largest = -1, 0


_backward = _Backward()


def is_largest_yet(tensor: Tensor) -> bool:
    """Whether `tensor` has more elements than all earlier arguments of this function in this backward.

    Among equal blocks, the first one to run backward does so while the saved tensors of all others are alive: its
    memory makes the peak of the step. Later blocks have room below that peak.
    """
    task, size = current_graph_task_id(), tensor.numel()
    if task == _backward.task and size <= _backward.largest:
        return False
    _backward.task, _backward.largest = task, size
    return True


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts inputs of linears on this tensor's device; None if it is off."""
    if not any_autocast_enabled():
        return None
    # Test `is_cuda` and `is_cpu` first: reading `device.type` takes longer than all the rest.
    device = "cuda" if tensor.is_cuda else "cpu" if tensor.is_cpu else tensor.device.type
    if not _is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


_is_autocast_available = functools.cache(torch.amp.is_autocast_available)
_NOTHING_TO_DO: AbstractContextManager[object] = nullcontext()


def autocast_as(dtype: torch.dtype | None, tensor: Tensor) -> AbstractContextManager[object]:
    """Autocast on the tensor's device as :func:`autocast_dtype` found it: to `dtype`, or off for None."""
    if dtype is None and autocast_dtype(tensor) is None:
        return _NOTHING_TO_DO
    # No cache: some versions of PyTorch would use a weight's cast made here, without a graph, in a later forward.
    return torch.autocast(tensor.device.type, dtype, enabled=dtype is not None, cache_enabled=False)


def without_autocast(backward: Callable[[Any, Tensor], R]) -> Callable[[Any, Tensor], R]:
    """`backward`, of a function of one output, with autocast off."""

    @functools.wraps(backward)
    def outside(ctx: Any, dy: Tensor) -> R:
        if not any_autocast_enabled():
            return backward(ctx, dy)
        with autocast_as(None, dy):
            return backward(ctx, dy)

    return outside


def not_a_view(output: Tensor) -> Tensor:
    """`output`, a new tensor, as one that may be changed in place after a forward of an autograd function returns it.

    Autograd refuses that for views, and `F.linear` with a bias returns a view of a matrix without other references.
    """
    return output if output._base is None else output.data  # an alias that is not tracked as a view
