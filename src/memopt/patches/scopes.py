"""Which modules of a model run inside a scope, and what each scope does: families of rules and a compression."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from memopt.patches.scope import ScopeRewrite
from memopt.plan.plan import Plan
from memopt.plan.recipe import Recipe
from memopt.saved.compression import Compression


def choose_scopes(plan: Plan) -> dict[str, ScopeRewrite]:
    """Module -> the scope that it is: families of rules, and how that is kept which stays."""
    families, compression = _scoped_families(plan), _compression(plan.recipe)
    compressed = _compressed(plan) if compression is not None else ()
    default = _families(plan.recipe)
    scopes = {name: ScopeRewrite(rules) for name, rules in families.items()}
    return scopes | {name: ScopeRewrite(families.get(name, default), compression) for name in compressed}


def _families(recipe: Recipe) -> frozenset[str]:
    methods = {
        "norm": recipe.norms.method,
        "activation": recipe.activations.method,
        "gated_mlp": recipe.gated_mlps.method,
    }
    return frozenset(family for family, method in methods.items() if method != "none")


def _compression(recipe: Recipe) -> Compression | None:
    kept = recipe.kept
    bits: dict[str, Literal[4, 8]] = {"int8": 8, "int4": 4}
    return Compression(bits[kept.method], kept.rounding == "stochastic") if kept.method in bits else None


def _compressed(plan: Plan) -> tuple[str, ...]:
    """The modules that keep what stays in fewer bits: blocks, or the MLPs in them."""
    if plan.recipe.kept.where == "block":
        chosen: Iterable[str] = plan.sites.blocks
    else:
        parents = (site.name.rpartition(".")[0] if site.is_module else site.name for site in plan.sites.activations)
        chosen = (*(site.name for site in plan.sites.gated_mlps), *parents)
    return tuple(name for name in dict.fromkeys(chosen) if name and plan.recipe.selects(name))


def _scoped_families(plan: Plan) -> dict[str, frozenset[str]]:
    """Module -> families of rules that hold inside it.

    These are the blocks in which something is rewritten, and outside of blocks every module that reads or makes an
    output that can be made again. Sites inside that the recipe leaves alone get a narrower scope of their own.
    """
    sites, families = plan.sites, _families(plan.recipe)
    rewritten = {entry.site for entry in plan.rewrites}
    scopes = {block: families for block in sites.blocks if any(_inside(name, [block]) for name in rewritten)}
    norms = plan.norms("fold", "share", "recompute")
    readers = [consumer.module for norm in norms for consumer in norm.consumers]
    replayed = {norm.name for norm in norms if not norm.has_formula}
    readers += [linear.module for linear in sites.linears if linear.fed_by in replayed]
    modules_of = {linear.parameter: linear.module for linear in sites.linears}
    readers += [modules_of[site.next_linear] for site in plan.activations() if site.next_linear in modules_of]
    gated = [site.name for site in sites.gated_mlps if site.name in rewritten]
    # Around an activation that keeps a code, and whoever reads it.
    coded = [_around(site.name, modules_of.get(site.next_linear or "")) for site in plan.activations("code")]
    scopes |= {name: families for name in (*readers, *gated, *coded) if name and not _inside(name, sites.blocks)}
    left = {site.name: {"gated_mlp", "activation"} for site in sites.gated_mlps if site.name not in rewritten}
    left |= {
        modules_of[site.next_linear]: {"activation"}
        for site in sites.activations
        if site.next_linear in modules_of
        and site.gated_mlp is None
        and site.name not in rewritten
        # One that keeps its output has nothing to rewrite, but a dropped-out copy of it can be made again.
        and not (site.keeps_its_output and plan.recipe.selects(site.name))
    }
    for name, excluded in left.items():
        if name in scopes or _inside(name, scopes):
            scopes[name] = scopes.get(name, families) - excluded
    return scopes


def _around(name: str, reader: str | None) -> str:
    """The innermost module that `name` and `reader` are in."""
    ancestor = name.rpartition(".")[0]
    while reader is not None and ancestor and not _inside(reader, [ancestor]):
        ancestor = ancestor.rpartition(".")[0]
    return ancestor


def innermost(name: str, scopes: Mapping[str, ScopeRewrite]) -> ScopeRewrite:
    """The scope that `name` is, or else the families of the innermost of `scopes` that it is in."""
    if name in scopes:
        return scopes[name]
    around = [scope for scope in scopes if _inside(name, [scope])]
    return ScopeRewrite(scopes[max(around, key=len)].families if around else frozenset())


def _inside(name: str, blocks: Collection[str]) -> bool:
    return any(name == block or name.startswith(block + ".") for block in blocks)
