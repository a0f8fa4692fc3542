"""Modules with the weights of several linears in one parameter: experts, whose own forward stays.

It is told what it reads: weights that a parametrisation computes for the time of a call (an adapter's product added to
all experts), and rows of hidden states that can be recomputed. A scope then saves neither (`memopt.saved`). Nor is the
output of a product saved that is multiplied with the router's weights (`memopt.patches.linear.weighted`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memopt.patches.functions import Mode, run_inside, without_modes
from memopt.patches.linear.weighted import weighted_products
from memopt.patches.swap import original_class, steps_aside, swap_forward, wraps_any_forward
from memopt.recompute.versions import with_witness
from memopt.recompute.weights import Settings, adds, tell_weight
from memopt.saved.scope import in_a_scope
from memopt.torch_compat import is_checkpointed_region, parametrizations_are_cached


@dataclass(frozen=True)
class StackedRewrite:
    """What such a module knows."""

    modes: tuple[Mode, ...] = ()
    """The modes that it runs inside, outermost first."""
    proven: set[tuple[str, str]] = field(default_factory=set, compare=False)
    """(parameter, class of its parametrisation) of the sums that were computed once more and came out the same."""
    settings: dict[str, Settings] = field(default_factory=dict, compare=False)
    """Of each parameter that was parametrised."""


def patch_stacked(module: nn.Module) -> None:
    """Let what `module` reads be recomputed: weights computed from its parameters, rows of its inputs.

    Raises:
        ValueError: the module cannot be swapped.
    """
    swap_forward(module, _forward, StackedRewrite(without_modes(module)))


@wraps_any_forward
def _forward(stock: Callable[..., Any], rewrite: StackedRewrite, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    stock = functools.partial(run_inside, rewrite.modes, stock)
    if torch.compiler.is_compiling():
        return stock(module, *args, **kwargs)
    saves = not steps_aside() and in_a_scope()
    if saves:
        for given in (*args, *kwargs.values()):
            if isinstance(given, Tensor):
                with_witness(given if given._base is None else given._base)
    # Without the cache every read computes another tensor.
    if "parametrizations" in module._modules and parametrizations_are_cached():
        # A checkpointed block saves its sums while it runs again alone: they would be computed a third time.
        _tell_weights(module, rewrite, saves and not is_checkpointed_region())
    with weighted_products(module, args) if saves else nullcontext():
        return stock(module, *args, **kwargs)


def _tell_weights(module: nn.Module, rewrite: StackedRewrite, saves: bool) -> None:
    computed: Any = module._modules["parametrizations"]
    for name, steps in computed.items():
        weight = getattr(steps, "original", None)
        if len(steps) != 1 or weight is None:
            continue
        settings = rewrite.settings.setdefault(name, Settings())
        settings.see(weight)
        if not saves:
            continue
        key = (name, type(steps[0]).__qualname__)
        if key in rewrite.proven or adds(steps, weight):
            rewrite.proven.add(key)
            tell_weight(getattr(module, name), weight, settings)
        else:
            warnings.warn(
                f"memopt: {original_class(module).__name__} computes its {name} anew for every call, and it is saved "
                "whole: only the sum with one adapter's product is recomputed. Of several train one adapter at a time.",
                stacklevel=2,
            )
