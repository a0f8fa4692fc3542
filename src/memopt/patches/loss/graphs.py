"""The graph of the value of logits: autograd functions by which they share it, and its state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memopt.kernels.base.autograd import DirectFunction


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
