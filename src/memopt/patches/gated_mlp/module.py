"""Gated MLP modules whose activation and product run as one operator that saves only gate and up.

The children stay: gate, up and a wrapped down are called as in the stock forward, so adapters, quantised linears and
hooks on them work. A plain `nn.Linear` without hooks as down is not called: one function computes it, and recomputes
and differentiates the product in one pass of backward. With a hooked or replaced activation the stock forward runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memopt.kernels.base.autograd import autocast_dtype
from memopt.kernels.gated_mlp.function import gated_linear, gated_product, gated_product_fused
from memopt.kernels.linear.function import linear
from memopt.kernels.linear.weighted import followed
from memopt.patches.reads import observed_reads
from memopt.patches.scope import ScopeRewrite
from memopt.patches.swap import is_watched, parameters_of, steps_aside, swap_forward
from memopt.saved.whole import kept_whole
from memopt.torch_compat.activations import SMOOTH
from memopt.walk.probes.isolate import random_linear
from memopt.walk.sites import GatedForm, GatedMLPSite


@dataclass(frozen=True)
class GatedMLPRewrite:
    """State of a patched gated MLP: its formula and the names of its children."""

    activation: str
    form: GatedForm
    gate: str
    up: str
    down: str
    act: str | None
    between: str | None
    scope: ScopeRewrite
    """The scope that each call opens: the module's own, or one with the families of the scope around the module."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Children that are not called, unless they have hooks: the forward reads their parameters instead."""
        return (self.down,)


_gated_linear_whole = kept_whole()(gated_linear)
_gated_product_whole = kept_whole()(gated_product)
_gated_product_fused_whole = kept_whole()(gated_product_fused)


def patch_gated_mlp(module: nn.Module, site: GatedMLPSite, scope: ScopeRewrite) -> None:
    """Make `module`, whose forward is down(act(gate(x)) * up(x)), run its activation and product as one operator."""
    if site.form is None or site.children is None:
        raise ValueError("its forward does more than down(act(gate(x)) * up(x))")
    gate, up, down = site.children
    rewrite = GatedMLPRewrite(site.activation, site.form, gate, up, down, site.act, site.between, scope)
    generator = torch.Generator().manual_seed(0)
    projection = random_linear(4, 4 if site.form == "separate" else 8, generator)
    stand_ins: dict[str, nn.Module] = {gate: projection, up: projection, down: random_linear(4, 4, generator)}
    if site.between is not None:
        stand_ins[site.between] = nn.Identity()
    x = torch.ones(2, 4, dtype=torch.float64, device="cpu")
    reads = observed_reads(module, lambda alone: alone.forward(x), children=stand_ins)
    swap_forward(module, _forward, rewrite, reads)


def _forward(stock: Callable[..., Any], rewrite: GatedMLPRewrite, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if steps_aside():
        return stock(module, *args, **kwargs)
    given = (*args, *kwargs.values())
    children = module._modules
    down = children[rewrite.down]
    assert down is not None
    with rewrite.scope.around(module, args, kwargs):
        # A weight that is computed anew at each read (a parametrisation, which may draw numbers) is left to stock.
        is_plain = len(given) == 1 and "parametrizations" not in down._modules
        if not is_plain or not _activates_as_patched(rewrite, children) or _gets_a_cast(down, given[0]):
            return stock(module, *args, **kwargs)
        # A function of its own, so that only autograd refers to the saved tensors when the scope ends.
        return _run(rewrite, children, down, given[0])


def _run(rewrite: GatedMLPRewrite, children: dict[str, nn.Module | None], down: nn.Module, x: Tensor) -> Any:
    gate_up = _gate_and_up(rewrite, children, x)
    between = children[rewrite.between] if rewrite.between else None
    if between is not None and not _is_off(between):
        return down(between(_product(rewrite, *gate_up)))
    own = parameters_of(down)  # without weights that a tool computes from others
    weight, bias = own.get("weight"), own.get("bias")
    if type(down) is not nn.Linear or weight is None or "bias" not in own or is_watched(down):
        return down(_product(rewrite, *gate_up))
    # A call of `down` would be F.linear with its weight and bias.
    y = None
    # Where products are followed, a later multiplication of y needs the input of this product.
    if followed.held is None or followed.products is None:
        run = gated_linear if rewrite.activation in SMOOTH else _gated_linear_whole
        y = run(*gate_up, rewrite.activation, rewrite.form == "gate_up", weight, bias)
    return linear(_product(rewrite, *gate_up), weight, bias) if y is None else y


def _gate_and_up(
    rewrite: GatedMLPRewrite, children: dict[str, nn.Module | None], x: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gate and up, or both in one tensor and None."""
    gate, up = children[rewrite.gate], children[rewrite.up]
    assert gate is not None
    assert up is not None
    return (gate(x), up(x)) if rewrite.form == "separate" else (gate(x), None)


def _product(rewrite: GatedMLPRewrite, gate: Tensor, up: Tensor | None) -> Tensor:
    is_smooth = rewrite.activation in SMOOTH
    if up is None:
        run = gated_product_fused if is_smooth else _gated_product_fused_whole
        return run(gate, rewrite.activation, rewrite.form == "gate_up")
    return (gated_product if is_smooth else _gated_product_whole)(gate, up, rewrite.activation)


def _activates_as_patched(rewrite: GatedMLPRewrite, children: dict[str, nn.Module | None]) -> bool:
    """Whether the activation need not be called: it is a function, or a child without hooks."""
    if rewrite.act is None:
        return True
    act = children.get(rewrite.act)  # still the child of the time of patching, which `Reads.hold` checks
    return act is not None and not is_watched(act)


def _gets_a_cast(down: nn.Module, x: Tensor) -> bool:
    """Whether the weight of `down` has another floating-point dtype than `x`, without autocast. The stock forward may
    then cast in between (T5 in fp16). Integer weights of quantised linears do not count."""
    weight = down._parameters.get("weight")
    if weight is None:  # PEFT's adapters, or no parameter; never by attribute, which may compute it
        inner = getattr(down, "base_layer", down)
        weight = inner._parameters.get("weight", vars(inner).get("weight"))
    if not isinstance(weight, Tensor) or weight.dtype is x.dtype or not weight.is_floating_point():
        return False
    return autocast_dtype(x) is None


def _is_off(module: nn.Module) -> bool:
    """Whether `module` is an `nn.Dropout` without hooks that returns its input: p is 0, or it is in eval mode."""
    is_dropout = type(module) is nn.Dropout and (module.p == 0 or not module.training)
    return is_dropout and not is_watched(module)
