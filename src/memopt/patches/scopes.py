"""Which modules of a model run inside a scope, and what each scope does: families of rules and a compression."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from torch import nn

from memopt.patches.base import PlanView
from memopt.patches.functions import Mode
from memopt.patches.registry import patches
from memopt.patches.scope import ScopeRewrite


def choose_scopes(plan: PlanView) -> dict[str, ScopeRewrite]:
    """Module -> the scope that it is."""
    default = frozenset[str]().union(*(patch.families(plan.recipe) for patch in patches()))
    families = _scoped_families(plan, default)
    settles = any(patch.settles(plan) for patch in patches())
    prepares = {name: None if settles else _prepare(plan, name) for name in families}
    scopes = {name: ScopeRewrite(rules, prepare=prepares[name]) for name, rules in families.items()}
    for patch in patches():
        compression = patch.compression(plan.recipe)
        for name in dict.fromkeys(patch.compressed(plan)) if compression is not None else ():
            if name and plan.recipe.selects(name):
                scopes[name] = ScopeRewrite(families.get(name, default), compression)
    return {name: replace(scope, modes=_modes(plan, name)) for name, scope in scopes.items()}


def _modes(plan: PlanView, scope: str) -> tuple[Mode, ...]:
    return tuple(mode for patch in patches() if (mode := patch.mode(plan, scope)) is not None)


def _prepare(plan: PlanView, scope: str) -> Callable[[nn.Module], None] | None:
    found = [prepare for patch in patches() if (prepare := patch.prepares(plan, scope)) is not None]
    return functools.partial(_call_each, tuple(found)) if len(found) > 1 else next(iter(found), None)


def _call_each(functions: tuple[Callable[[nn.Module], None], ...], module: nn.Module) -> None:
    for function in functions:
        function(module)


def innermost(name: str, scopes: Mapping[str, ScopeRewrite]) -> ScopeRewrite:
    """The scope that `name` is, or else the families of the innermost of `scopes` that it is in."""
    if name in scopes:
        return scopes[name]
    around = [scope for scope in scopes if _is_inside(name, [scope])]
    if not around:
        return ScopeRewrite(frozenset())
    scope = scopes[max(around, key=len)]
    return ScopeRewrite(scope.families, prepare=scope.prepare)


def _scoped_families(plan: PlanView, default: frozenset[str]) -> dict[str, frozenset[str]]:
    """Module -> families of rules that hold inside it.

    These are the blocks in which something is rewritten, and outside of blocks every module that reads or makes an
    output that can be recomputed. Sites inside that the recipe leaves alone get a narrower scope of their own.
    """
    blocks, rewritten = plan.sites.blocks, {entry.site for entry in plan.rewrites}
    scopes = {block: default for block in blocks if any(_is_inside(name, [block]) for name in rewritten)}
    outside = (name for patch in patches() for name in patch.scoped(plan) if name and not _is_inside(name, blocks))
    scopes |= dict.fromkeys(outside, default)
    for patch in patches():
        for name, excluded in patch.unscoped(plan).items():
            if _is_inside(name, scopes):
                scopes[name] = scopes.get(name, default) - excluded
    return scopes


def _is_inside(name: str, blocks: Collection[str]) -> bool:
    return any(name == block or name.startswith(block + ".") for block in blocks)
