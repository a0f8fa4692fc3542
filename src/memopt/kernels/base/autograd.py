"""What the operators' autograd functions share."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from types import CodeType
from typing import Any

import torch
from torch import Tensor


class DirectFunction(torch.autograd.Function):
    """An autograd function whose `apply` leaves out the question for function transforms (`torch.func`).

    That question is half of what applying a function costs. Callers have put it before: modules step aside there.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


#: The code that runs while such a function saves its tensors.
DIRECT_APPLY: CodeType = DirectFunction.apply.__func__.__code__  # type: ignore[attr-defined]


def refuse_double_backward() -> None:
    """Call it first in a backward that is not itself differentiable.

    `torch.autograd.function.once_differentiable` raises only where the incoming gradient has a graph of its own, and
    otherwise loses the second derivative without a word.

    Raises:
        RuntimeError: backward runs with ``create_graph=True``.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "memopt's operators have no second derivative, so backward cannot run with create_graph=True. "
            "Call memopt.unpatch(model) first."
        )


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype that autocast gives to what a linear reads on this tensor's device; None where autocast is off."""
    device = tensor.device.type
    if not _is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


_is_autocast_available = functools.cache(torch.amp.is_autocast_available)
_NOTHING_TO_DO: AbstractContextManager[object] = nullcontext()


def autocast_as(dtype: torch.dtype | None, tensor: Tensor) -> AbstractContextManager[object]:
    """Autocast on the tensor's device as :func:`autocast_dtype` found it: to `dtype`, or off for None."""
    if dtype is None and autocast_dtype(tensor) is None:
        return _NOTHING_TO_DO
    return torch.autocast(tensor.device.type, dtype, enabled=dtype is not None)


def not_a_view(output: Tensor) -> Tensor:
    """What the forward of an autograd function returns of `output`, a new tensor, so that it may be changed in place.

    Autograd refuses that for views, and `F.linear` with a bias returns a view of a matrix that nobody else has.
    """
    if output._base is None:
        return output
    alias: Tensor = torch.ops.aten._unsafe_view(output, output.shape)
    return alias
