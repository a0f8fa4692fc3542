"""Activation modules composed of several operations, made to keep their input only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from memopt.kernels.activation import recomputed_activation
from memopt.patches.swap import restore_forward, steps_aside, swap_forward


def patch_activation(module: nn.Module) -> None:
    """Make `module` (elementwise, no parameters) keep its input only.

    Raises:
        ValueError: the module cannot be swapped.
    """
    swap_forward(module, _forward, None)


def unpatch_activation(module: nn.Module) -> None:
    """Undo :func:`patch_activation`."""
    restore_forward(module)


def _forward(stock: Callable[..., Tensor], _: None, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    given = (*args, *kwargs.values())
    if steps_aside() or len(given) != 1 or not given[0].requires_grad:
        return stock(module, *args, **kwargs)
    z: Tensor = given[0]
    return recomputed_activation(z, functools.partial(stock, module))
