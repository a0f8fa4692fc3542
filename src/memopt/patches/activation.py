"""Activation modules made to keep their input only: those composed of several operations, and those whose linear makes
their output again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from memopt.kernels.activation import recomputed_activation
from memopt.kernels.device import runs_triton
from memopt.kernels.linear import withdraw
from memopt.patches.swap import is_watched, restore_forward, steps_aside, swap_forward
from memopt.walk.sites import ActivationSite


@dataclass(frozen=True)
class ActivationRewrite:
    """What a patched activation knows."""

    kind: str
    """As in `memopt.walk.sites.ActivationSite`."""
    is_one_operation: bool
    """The stock module keeps its input only, as it is; a kernel of ours helps the linear behind it."""


def patch_activation(module: nn.Module, site: ActivationSite) -> None:
    """Make `module` (elementwise, no parameters) keep its input only.

    Raises:
        ValueError: the module cannot be swapped.
    """
    swap_forward(module, _forward, ActivationRewrite(site.kind, site.operations == 1))


def unpatch_activation(module: nn.Module) -> None:
    """Undo :func:`patch_activation`."""
    restore_forward(module)


def _forward(
    stock: Callable[..., Tensor], rewrite: ActivationRewrite, module: nn.Module, *args: Any, **kwargs: Any
) -> Tensor:
    given = (*args, *kwargs.values())
    if steps_aside() or len(given) != 1 or not given[0].requires_grad:
        return stock(module, *args, **kwargs)
    z: Tensor = given[0]
    if rewrite.is_one_operation and not runs_triton(z):
        return stock(module, *args, **kwargs)
    h = recomputed_activation(z, functools.partial(stock, module), rewrite.kind)
    if is_watched(module):
        withdraw(h)
    return h
