"""Carry a plan out on a live model, and undo it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from memopt.activations import ACTIVATIONS
from memopt.patches.activation.module import ActivationRewrite, patch_activation, unpatch_activation
from memopt.patches.dropout.module import DropoutRewrite, patch_dropout, unpatch_dropout
from memopt.patches.gated_mlp.module import GatedMLPRewrite, patch_gated_mlp, unpatch_gated_mlp
from memopt.patches.linear.module import LinearRewrite, patch_linear, trains_as_linear, unpatch_linear
from memopt.patches.norm.module import NormRewrite, patch_norm, unpatch_norm
from memopt.patches.replay.module import ReplayRewrite, patch_replay, unpatch_replay
from memopt.patches.sampled_linear.module import SampledLinearRewrite, patch_sampled_linear, unpatch_sampled_linear
from memopt.patches.sampled_linear.visits import VisitRewrite, Visits, patch_visits, unpatch_visits
from memopt.patches.scope import ScopeRewrite, patch_scope, unpatch_scope
from memopt.patches.scopes import choose_scopes, innermost
from memopt.patches.sum_norm.module import SumNormRewrite, patch_sum_norm, unpatch_sum_norm
from memopt.patches.swap import is_swapped, swap_state
from memopt.plan.plan import Plan
from memopt.plan.recipe import ActivationRules, Recipe
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
    inside = choose_scopes(plan)
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
            attempts.run("gated_mlps", mlp.name, patch_gated_mlp, modules[mlp.name], mlp, innermost(mlp.name, inside))
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


def _sampling(recipe: Recipe) -> Sampling:
    rules = recipe.linears
    assert rules.method != "exact"
    return Sampling(rules.method, rules.budget)


def _child(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child
