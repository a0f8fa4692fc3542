"""Carry a plan out on a live model, and undo it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from memopt.kernels.activation.formulas import ACTIVATIONS
from memopt.patches.activation.module import ActivationRewrite, patch_activation, unpatch_activation
from memopt.patches.dropout.module import DropoutRewrite, patch_dropout, unpatch_dropout
from memopt.patches.gated_mlp.module import GatedMLPRewrite, patch_gated_mlp, unpatch_gated_mlp
from memopt.patches.linear.module import LinearRewrite, patch_linear, trains_as_linear, unpatch_linear
from memopt.patches.norm.module import NormRewrite, patch_norm, unpatch_norm
from memopt.patches.replay.module import ReplayRewrite, patch_replay, unpatch_replay
from memopt.patches.sampled_linear.module import SampledLinearRewrite, patch_sampled_linear, unpatch_sampled_linear
from memopt.patches.sampled_linear.visits import VisitRewrite, Visits, patch_visits, unpatch_visits
from memopt.patches.scope import ScopeRewrite, patch_scope, unpatch_scope
from memopt.patches.sum_norm.module import SumNormRewrite, patch_sum_norm, unpatch_sum_norm
from memopt.patches.swap import is_swapped, swap_state
from memopt.plan.plan import Plan
from memopt.plan.recipe import ActivationRules, Recipe
from memopt.saved.compression import Compression
from memopt.saved.sampled import Sampling
from memopt.walk.sites import ActivationSite


@dataclass(frozen=True)
class Applied:
    """What :func:`apply` did."""

    plan: Plan
    norms: tuple[str, ...]
    activations: tuple[str, ...]
    linears: tuple[str, ...]
    """Those that make the output of the activation before them again, where Triton runs."""
    sampled_linears: tuple[str, ...]
    """Those that keep a sample of the rows of their input, where nobody else holds it."""
    dropouts: tuple[str, ...]
    """Those that keep a seed."""
    gated_mlps: tuple[str, ...]
    """Those whose activation and product run as one operator; in the others the scope recomputes the stock ones."""
    sum_norms: tuple[str, ...]
    """Post-norm modules whose norm, itself one of `norms`, reads both terms of its input, where Triton runs."""
    scopes: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    """(module, reason) of planned rewrites that the module itself did not admit."""

    @property
    def patched(self) -> int:
        """Number of modules that were changed."""
        return sum(len(getattr(self, kind)) for kind in _KINDS)


#: The fields of :class:`Applied` that name patched modules.
_KINDS = ("norms", "activations", "linears", "sampled_linears", "dropouts", "gated_mlps", "sum_norms", "scopes")


def apply(model: nn.Module, plan: Plan, *, folded: Collection[str] = ()) -> Applied:
    """Rewrite the modules of `model` as `plan` says, in place and reversibly; weights are not changed.

    Args:
        model: the model that `plan.sites` describes (same module names).
        plan: what to do. Norms planned to be folded are shared here: folding is a matter of checkpoints.
        folded: names of norms whose affine has already been folded away in the weights that `model` holds.
    """
    modules = dict(model.named_modules())
    attempts = _Attempts()
    inside = _scopes(plan)
    for norm in plan.norms("fold", "share", "recompute"):
        patch = patch_norm if norm.has_formula else patch_replay
        attempts.run("norms", norm.name, patch, modules[norm.name], norm, folded=norm.name in folded)
    for dropout in plan.seeded_dropouts():
        attempts.run("dropouts", dropout.name, patch_dropout, modules[dropout.name])
    visits = Visits()
    for name in dict.fromkeys(site.module for site in plan.sampled_linears()):
        attempts.run("sampled_linears", name, patch_sampled_linear, modules[name], _sampling(plan.recipe), visits, name)
    coded = {site.name for site in plan.activations("code")}
    for activation, linear in _activations(plan, modules):
        if activation.parameters:
            attempts.run("activations", activation.name, patch_replay, modules[activation.name])
        else:
            rules = plan.recipe.activations if activation.name in coded else ActivationRules()
            attempts.run("activations", activation.name, patch_activation, modules[activation.name], activation, rules)
        if linear is not None:
            attempts.run("linears", linear, patch_linear, modules[linear])
    for mlp in plan.gated_mlps():
        # One operator keeps gate and up, so where the recipe wants codes instead, the stock operations run.
        if mlp.form is not None and not any(site.gated_mlp == mlp.name for site in plan.activations("code")):
            attempts.run("gated_mlps", mlp.name, patch_gated_mlp, modules[mlp.name], mlp, _innermost(mlp.name, inside))
    for post in plan.sites.sum_norms:
        if _child(post.name, post.norm) in attempts.done["norms"]:
            attempts.run("sum_norms", post.name, patch_sum_norm, modules[post.name], post, inside.get(post.name))
    for name, scope in inside.items():
        if not is_swapped(modules[name]):
            attempts.run("scopes", name, patch_scope, modules[name], scope)
    if attempts.done["sampled_linears"]:
        try:
            patch_visits(model, visits)
        except ValueError as reason:
            attempts.refused.append(("", f"its sampled linears are told of neither padding nor samples: {reason}"))
    done = {kind: tuple(names) for kind, names in attempts.done.items()}
    return Applied(plan, refused=tuple(attempts.refused), **done)


class _Attempts:
    """What was patched, and what did not admit it."""

    def __init__(self) -> None:
        self.done: dict[str, list[str]] = {kind: [] for kind in _KINDS}
        self.refused: list[tuple[str, str]] = []

    def run(self, kind: str, name: str, patch: Callable[..., None], *arguments: Any, **options: Any) -> None:
        try:
            patch(*arguments, **options)
            self.done[kind].append(name)
        except ValueError as reason:
            self.refused.append((name, str(reason)))


def undo(model: nn.Module) -> int:
    """Give every patched module of `model` its stock forward back; returns how many there were."""
    count = 0
    for module in model.modules():
        if is_swapped(module):
            _UNDO[type(swap_state(module))](module)
            count += 1
    return count


_UNDO: dict[type, Callable[[nn.Module], None]] = {
    NormRewrite: unpatch_norm,
    ActivationRewrite: unpatch_activation,
    LinearRewrite: unpatch_linear,
    SampledLinearRewrite: unpatch_sampled_linear,
    DropoutRewrite: unpatch_dropout,
    GatedMLPRewrite: unpatch_gated_mlp,
    SumNormRewrite: unpatch_sum_norm,
    ReplayRewrite: unpatch_replay,
    ScopeRewrite: unpatch_scope,
    VisitRewrite: unpatch_visits,
}


def is_patched(model: nn.Module) -> bool:
    """Whether any module of `model` is patched."""
    return any(is_swapped(module) for module in model.modules())


def _activations(plan: Plan, modules: Mapping[str, nn.Module]) -> Iterator[tuple[ActivationSite, str | None]]:
    """The activation modules to patch, each with the linear that is patched with it.

    A single operation keeps its input only, and a scope takes care of its output: alone it stays as it is, unless it
    is a copy of the output that is kept.
    """
    module_of = {linear.parameter: linear.module for linear in plan.sites.linears}
    coded = plan.activations("code")
    yield from ((site, None) for site in coded)
    for site in plan.activations():
        if not site.is_module or not site.replays or site in coded:
            continue
        is_known = site.kind in ACTIVATIONS and site.gated_mlp is None
        linear = module_of.get(site.next_linear) if is_known and site.next_linear is not None else None
        if linear is not None and not (linear in modules and trains_as_linear(modules[linear])):
            linear = None
        watched = site.copied and not site.keeps_its_output
        if site.operations > 1 or site.parameters or linear is not None or watched:
            yield site, linear


def _families(recipe: Recipe) -> frozenset[str]:
    methods = {
        "norm": recipe.norms.method,
        "activation": recipe.activations.method,
        "gated_mlp": recipe.gated_mlps.method,
    }
    return frozenset(family for family, method in methods.items() if method != "none")


def _scopes(plan: Plan) -> dict[str, ScopeRewrite]:
    """Module -> the scope that it is: families of rules, and how that is kept which stays."""
    families, compression = _scoped_families(plan), _compression(plan.recipe)
    compressed = _compressed(plan) if compression is not None else ()
    default = _families(plan.recipe)
    scopes = {name: ScopeRewrite(rules) for name, rules in families.items()}
    return scopes | {name: ScopeRewrite(families.get(name, default), compression) for name in compressed}


def _sampling(recipe: Recipe) -> Sampling:
    rules = recipe.linears
    assert rules.method != "exact"
    return Sampling(rules.method, rules.budget)


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


def _innermost(name: str, scopes: Mapping[str, ScopeRewrite]) -> ScopeRewrite:
    """The scope that `name` is, or else the families of the innermost of `scopes` that it is in."""
    if name in scopes:
        return scopes[name]
    around = [scope for scope in scopes if _inside(name, [scope])]
    return ScopeRewrite(scopes[max(around, key=len)].families if around else frozenset())


def _child(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _inside(name: str, blocks: Collection[str]) -> bool:
    return any(name == block or name.startswith(block + ".") for block in blocks)
