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
from memopt.saved.versions import with_witness
from memopt.walk.isolate import with_stand_ins
from memopt.walk.sites import ActivationSite


@dataclass(frozen=True)
class ActivationRewrite:
    """What a patched activation knows."""

    kind: str
    """As in `memopt.walk.sites.ActivationSite`."""
    is_one_operation: bool
    """The stock module keeps its input only, as it is; a kernel of ours helps the linear behind it."""
    linear: str | None = None
    """The child whose output it is a function of, if it runs one first."""


def patch_activation(module: nn.Module, site: ActivationSite) -> None:
    """Make `module` (elementwise, no parameters but those of its linear) keep its input, or its linear's output, only.

    Raises:
        ValueError: the module cannot be swapped.
    """
    swap_forward(module, _forward, ActivationRewrite(site.kind, site.operations == 1, site.linear))


def unpatch_activation(module: nn.Module) -> None:
    """Undo :func:`patch_activation`."""
    restore_forward(module)


def _forward(
    stock: Callable[..., Tensor], rewrite: ActivationRewrite, module: nn.Module, *args: Any, **kwargs: Any
) -> Tensor:
    given = (*args, *kwargs.values())
    if steps_aside() or len(given) != 1:
        return stock(module, *args, **kwargs)
    z: Tensor = given[0]
    function: Callable[[Tensor], Tensor] = functools.partial(stock, module)
    if rewrite.linear is not None:
        alone = with_stand_ins(module, {rewrite.linear: nn.Identity()}, training=module.training)
        z, function = getattr(module, rewrite.linear)(z), functools.partial(stock, alone)
    if not z.requires_grad or (rewrite.is_one_operation and not runs_triton(z)):
        return with_witness(function(z))
    h = with_witness(recomputed_activation(z, function, rewrite.kind))
    if is_watched(module):
        withdraw(h)
    return h
