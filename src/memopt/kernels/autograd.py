"""What the operators' autograd functions share."""

from __future__ import annotations

import torch


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
