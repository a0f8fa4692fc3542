"""Modules with the weights of several linears in one parameter (experts). Their own forward stays.

Tensors that they read are marked as recomputable: weights that a parametrisation computes for one call (an adapter's
product added to all experts), and hidden states of which they gather rows. A scope then saves neither (`memopt.saved`).
Outputs of products that are multiplied with router weights are not saved either (`memopt.patches.linear.weighted`).
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

_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


@dataclass(frozen=True)
class StackedRewrite:
    """State of a patched module with stacked weights."""

    modes: tuple[Mode, ...] = ()
    """The modes that it runs inside, outermost first."""
    proven: set[tuple[str, str]] = field(default_factory=set, compare=False)
    """(parameter, class of its parametrisation) of sums that gave equal bits when they were computed again."""
    settings: dict[str, Settings] = field(default_factory=dict, compare=False)
    """Parametrised parameter -> the count of its changes in place that changed no value."""


def patch_stacked(module: nn.Module) -> None:
    """Let backward recompute tensors that `module` reads: weights computed from parameters, rows of its inputs. Raises
    a ValueError if `module` cannot be swapped, or is a convolution, which gathers no rows."""
    if isinstance(module, _CONVOLUTIONS):
        raise ValueError("a convolution holds no stacked weights")
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
    # Without the cache of `parametrize.cached()`, every read computes another tensor.
    if "parametrizations" in module._modules and parametrizations_are_cached():
        # In a checkpointed block, sums are saved only during its second run; recomputing would be a third time.
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
