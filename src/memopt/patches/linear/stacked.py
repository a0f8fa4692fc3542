"""Modules with the weights of several linears in one parameter (experts). Their own forward stays.

Tensors that they read are marked as recomputable: weights that a parametrisation computes for one call (an adapter's
product added to all experts), and hidden states of which they gather rows. A scope then saves neither (`memopt.saved`).
Outputs of products that are multiplied with router weights are not saved either (`memopt.patches.linear.weighted`).

A computed weight is W + alpha * B A, of all experts in one tensor. The node of such a sum saves B and A, each a few
columns or rows of an expert, but not W. W is a leaf, which stays in memory anyway. :func:`tell_weight` notes W on the
node; readers then recompute the sum in backward.
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
from memopt.recompute.rules import RULES, WEIGHT, Node, recomputable
from memopt.recompute.versions import check_version, with_witness
from memopt.saved.scope import in_a_scope
from memopt.torch_compat import (
    FakeTensor,
    is_checkpointed_region,
    parametrizations_are_cached,
    saved,
    shows_saved,
    without_foreign_hooks,
)

_METADATA_KEY = "memopt.weight"
_SUM = "BaddbmmBackward0"
_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


@dataclass
class Settings:
    """Counts how often a weight was set to itself: PyTorch parametrises it so, and counts that as a change in place."""

    count: int = 0
    _version: int = -1

    def see(self, weight: Tensor) -> None:
        """Called once each time that `weight` has been parametrised."""
        self.count += weight._version == self._version + 1
        self._version = weight._version


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


def tell_weight(value: Tensor, weight: Tensor, settings: Settings) -> bool:
    """Let readers of `value` recompute it from `weight`; False if `value` is no sum of a batched product and a leaf.

    Args:
        value: (experts, rows, columns), the sum that a forward reads.
        weight: the leaf of equal shape and dtype in this sum; :func:`adds` has checked that.
        settings: counts the changes of `weight` that left its values as they were.
    """
    node: Node = value.grad_fn
    if node is None or node.name() != _SUM or _SUM not in RULES or value._version:
        return False
    # A factor is saved if the other factor needs a gradient: both must.
    (added, _), *factors = node.next_functions
    is_leaf = not weight.requires_grad if added is None else getattr(added, "variable", None) is weight
    if not is_leaf or any(edge is None for edge, _ in factors) or value.shape != weight.shape:
        return False
    node.metadata[_METADATA_KEY] = (weight, weight._version - settings.count, settings)
    with_witness(value)
    return True


def adds(compute: Callable[[], Tensor], weight: Tensor) -> bool:
    """Whether ``compute()`` adds a batched product to `weight`, and the recomputed sum equals its result bit by bit."""
    # Checkpointing's hooks would take the reads of saved tensors here for a backward.
    with without_foreign_hooks():
        value = compute()
        if not tell_weight(value, weight, Settings()):
            return False
        with torch.no_grad(), torch.autocast(value.device.type, enabled=False):
            return isinstance(value, FakeTensor) or torch.equal(_sum(value.grad_fn), value)


@recomputable(_SUM, WEIGHT, lambda node: _METADATA_KEY in node.metadata)
def _sum(node: Node) -> Tensor:
    weight, version, settings = node.metadata[_METADATA_KEY]
    check_version(weight, version + settings.count)
    factors = saved(node, "batch1"), saved(node, "batch2")
    return torch.baddbmm(weight.detach(), *factors, beta=saved(node, "beta"), alpha=saved(node, "alpha"))


if not shows_saved(_SUM):
    RULES.pop(_SUM, None)
