"""Carry a plan out on a live model, and undo it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from memopt.patches.activation import patch_activation, unpatch_activation
from memopt.patches.norm import NormRewrite, patch_norm, unpatch_norm
from memopt.patches.scope import ScopeRewrite, patch_scope, unpatch_scope
from memopt.patches.swap import is_swapped, swap_state
from memopt.plan import Plan
from memopt.recipe import Recipe


@dataclass(frozen=True)
class Applied:
    """What :func:`apply` did."""

    plan: Plan
    norms: tuple[str, ...]
    activations: tuple[str, ...]
    scopes: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    """(module, reason) of planned rewrites that the module itself did not admit."""

    @property
    def patched(self) -> int:
        """Number of modules that were changed."""
        return len(self.norms) + len(self.activations) + len(self.scopes)


def apply(model: nn.Module, plan: Plan, *, folded: Collection[str] = ()) -> Applied:
    """Rewrite the modules of `model` as `plan` says, in place and reversibly; weights are not changed.

    Args:
        model: the model that `plan.sites` describes (same module names).
        plan: what to do. Norms planned to be folded are shared here: folding is a matter of checkpoints.
        folded: names of norms whose affine has already been folded away in the weights that `model` holds.
    """
    modules = dict(model.named_modules())
    refused: list[tuple[str, str]] = []
    norms: list[str] = []
    for site in plan.norms("fold", "share"):
        try:
            patch_norm(modules[site.name], site, folded=site.name in folded)
            norms.append(site.name)
        except ValueError as reason:
            refused.append((site.name, str(reason)))
    activations: list[str] = []
    for activation in plan.activations():
        # A single operation keeps its input only; the scope below takes care of its output.
        if activation.is_module and activation.operations > 1 and activation.replays:
            try:
                patch_activation(modules[activation.name])
                activations.append(activation.name)
            except ValueError as reason:
                refused.append((activation.name, str(reason)))
    scopes: list[str] = []
    for name, families in _scopes(plan).items():
        module = modules[name]
        if is_swapped(module):
            continue
        try:
            patch_scope(module, families)
            scopes.append(name)
        except ValueError as reason:
            refused.append((name, str(reason)))
    return Applied(plan, tuple(norms), tuple(activations), tuple(scopes), tuple(refused))


def undo(model: nn.Module) -> int:
    """Give every patched module of `model` its stock forward back; returns how many there were."""
    count = 0
    for module in model.modules():
        if is_swapped(module):
            state = swap_state(module)
            if isinstance(state, NormRewrite):
                unpatch_norm(module)
            elif isinstance(state, ScopeRewrite):
                unpatch_scope(module)
            else:
                unpatch_activation(module)
            count += 1
    return count


def is_patched(model: nn.Module) -> bool:
    """Whether any module of `model` is patched."""
    return any(is_swapped(module) for module in model.modules())


def _families(recipe: Recipe) -> frozenset[str]:
    methods = {
        "norm": recipe.norms.method,
        "activation": recipe.activations.method,
        "gated_mlp": recipe.gated_mlps.method,
    }
    return frozenset(family for family, method in methods.items() if method != "none")


def _scopes(plan: Plan) -> dict[str, frozenset[str]]:
    """Module -> families of rules that hold inside it.

    These are the blocks in which something is rewritten, and outside of blocks every module that reads or makes an
    output that can be made again. Sites inside that the recipe leaves alone get a narrower scope of their own.
    """
    sites, families = plan.sites, _families(plan.recipe)
    rewritten = {entry.site for entry in plan.rewrites}
    scopes = {block: families for block in sites.blocks if any(_inside(name, [block]) for name in rewritten)}
    readers = [consumer.module for norm in plan.norms("fold", "share") for consumer in norm.consumers]
    gated = [site.name for site in sites.gated_mlps if site.name in rewritten]
    scopes |= {name: families for name in (*readers, *gated) if name and not _inside(name, sites.blocks)}
    modules_of = {linear.parameter: linear.module for linear in sites.linears}
    left = {site.name: {"gated_mlp", "activation"} for site in sites.gated_mlps if site.name not in rewritten}
    left |= {
        modules_of[site.next_linear]: {"activation"}
        for site in sites.activations
        if site.next_linear in modules_of and site.gated_mlp is None and site.name not in rewritten
    }
    for name, excluded in left.items():
        if name in scopes or _inside(name, scopes):
            scopes[name] = scopes.get(name, families) - excluded
    return scopes


def _inside(name: str, blocks: Collection[str]) -> bool:
    return any(name == block or name.startswith(block + ".") for block in blocks)
