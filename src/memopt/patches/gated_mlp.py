"""Gated MLP modules whose activation and product run as one operator that keeps gate and up only.

The children stay: gate, up and a wrapped down are called as the stock forward calls them, so adapters, quantised
linears and hooks on them work. Only a plain `nn.Linear` without hooks is taken into the operator, which then makes
the product again and differentiates it in one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from memopt.kernels.gated import gated_product, gated_product_fused
from memopt.kernels.linear import linear
from memopt.patches.swap import is_watched, restore_forward, steps_aside, swap_forward
from memopt.saved.scope import RecomputeScope
from memopt.walk.sites import GatedForm, GatedMLPSite


@dataclass(frozen=True)
class GatedMLPRewrite:
    """What a patched gated MLP knows: its formula and the names of its children."""

    activation: str
    form: GatedForm
    gate: str
    up: str
    down: str
    between: str | None
    families: frozenset[str]
    """Which rules hold inside, as in `memopt.patches.scope.ScopeRewrite`."""


def patch_gated_mlp(module: nn.Module, site: GatedMLPSite, families: frozenset[str]) -> None:
    """Make `module` run its activation and product as one operator.

    Raises:
        ValueError: the module cannot be swapped, or its forward is not of a form that is known.
    """
    if site.form is None or site.children is None:
        raise ValueError("its forward does more than down(act(gate(x)) * up(x))")
    gate, up, down = site.children
    rewrite = GatedMLPRewrite(site.activation, site.form, gate, up, down, site.between, families)
    swap_forward(module, _forward, rewrite)


def unpatch_gated_mlp(module: nn.Module) -> None:
    """Undo :func:`patch_gated_mlp`."""
    restore_forward(module)


def _forward(stock: Callable[..., Any], rewrite: GatedMLPRewrite, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    given = (*args, *kwargs.values())
    if steps_aside() or len(given) != 1:
        return stock(module, *args, **kwargs)
    children = module._modules
    down, between = children[rewrite.down], children[rewrite.between] if rewrite.between else None
    assert down is not None
    with RecomputeScope(rewrite.families):
        h = _product(rewrite, children, given[0])
        if between is not None and not _is_off(between):
            h = between(h)
        elif type(down) is nn.Linear and not is_watched(down):  # calling it is F.linear of its weight and bias
            return linear(h, down.weight, down.bias)
        return down(h)


def _product(rewrite: GatedMLPRewrite, children: dict[str, nn.Module | None], x: Tensor) -> Tensor:
    gate, up = children[rewrite.gate], children[rewrite.up]
    assert gate is not None
    assert up is not None
    if rewrite.form == "separate":
        return gated_product(gate(x), up(x), rewrite.activation)
    return gated_product_fused(gate(x), rewrite.activation, rewrite.form == "gate_up")


def _is_off(module: nn.Module) -> bool:
    """Whether `module` is a dropout that passes its input on."""
    is_dropout = type(module) is nn.Dropout and (module.p == 0 or not module.training)
    return is_dropout and not is_watched(module)
