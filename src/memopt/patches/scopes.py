"""Choose the modules of a model that run inside a scope, and the settings of each scope."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from torch import nn

from memopt.patches.base import InScopes, PlanView
from memopt.patches.scope import ScopeRewrite
from memopt.walk.sites import is_inside


def choose_scopes(plan: PlanView, every: Sequence[InScopes]) -> dict[str, ScopeRewrite]:
    """Module name -> its scope; `every` is the effect of each patch."""
    default = frozenset[str]().union(*(each.families for each in every))
    families = _scoped_families(plan, every, default)
    scopes = {name: ScopeRewrite(rules) for name, rules in families.items()}
    if not any(each.exchanges for each in every):
        scopes = {name: replace(scope, prepare=_prepare(every, name)) for name, scope in scopes.items()}
    for each in every:
        for name in each.compressed if each.compression is not None else ():
            if name and plan.recipe.selects(name):
                scopes[name] = ScopeRewrite(families.get(name, default), each.compression)
    modes = {name: tuple(each.modes[name] for each in every if name in each.modes) for name in scopes}
    return {name: replace(scope, modes=modes[name]) for name, scope in scopes.items()}


def _prepare(every: Sequence[InScopes], scope: str) -> Callable[[nn.Module], None] | None:
    found = [each.prepare(scope) for each in every if each.prepare is not None]
    functions = tuple(function for function in found if function is not None)
    return functools.partial(_call_each, functions) if len(functions) > 1 else next(iter(functions), None)


def _call_each(functions: tuple[Callable[[nn.Module], None], ...], module: nn.Module) -> None:
    for function in functions:
        function(module)


def innermost(name: str, scopes: Mapping[str, ScopeRewrite]) -> ScopeRewrite:
    """The scope of the module `name`; without one, a scope with the families of the innermost scope around it."""
    if name in scopes:
        return scopes[name]
    around = [scope for scope in scopes if is_inside(name, scope)]
    if not around:
        return ScopeRewrite(frozenset())
    scope = scopes[max(around, key=len)]
    return ScopeRewrite(scope.families, prepare=scope.prepare)


def _scoped_families(plan: PlanView, every: Sequence[InScopes], default: frozenset[str]) -> dict[str, frozenset[str]]:
    """Module with a scope -> families of rules that hold inside it.

    Scopes are the blocks in which something is rewritten and, outside of blocks, the modules that patches name in
    `InScopes.outside`. Modules inside for which a patch excludes families get a narrower scope of their own.
    """
    blocks, rewritten = plan.sites.blocks, {entry.site for entry in plan.rewrites}
    scopes = {block: default for block in blocks if any(is_inside(name, block) for name in rewritten)}
    outside = (name for each in every for name in each.outside if name and not _is_in_any(name, blocks))
    scopes |= dict.fromkeys(outside, default)
    for each in every:
        for name, excluded in each.excluded.items():
            if _is_in_any(name, scopes):
                scopes[name] = scopes.get(name, default) - excluded
    return scopes


def _is_in_any(name: str, modules: Collection[str]) -> bool:
    return any(is_inside(name, module) for module in modules)
