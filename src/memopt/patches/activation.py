"""Activation modules composed of several operations, made to keep their input only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memopt.kernels.activation import recomputed_activation
from memopt.patches.swap import restore_forward, swap_forward


def patch_activation(module: nn.Module) -> None:
    """Make `module` (elementwise, no parameters) keep its input only.

    Raises:
        ValueError: the module cannot be swapped.
    """
    swap_forward(module, _forward, None)


def unpatch_activation(module: nn.Module) -> None:
    """Undo :func:`patch_activation`."""
    restore_forward(module)


def _forward(stock: Callable[..., Tensor], _: None, module: nn.Module, z: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not z.requires_grad or args or kwargs:
        return stock(module, z, *args, **kwargs)
    return recomputed_activation(z, functools.partial(stock, module))
