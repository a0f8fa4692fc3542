"""Activations: backward recomputes their output from their input, or they save a code of the derivative in place of
the input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, get_args

from memopt.patches.base import (
    EXCLUDED,
    LEFT,
    OFF,
    OVERWRITTEN,
    Effect,
    InScopes,
    Live,
    Patch,
    PlanView,
    RecipeView,
    Rows,
    Rules,
)
from memopt.patches.capabilities import Checks, Output, Saves, Trial
from memopt.recompute.rules import ELEMENTWISE
from memopt.walk.sites import ActivationSite, Sites, is_inside, parent

if TYPE_CHECKING:
    from torch import nn

    from memopt.patches.checks import Check


#: Codes of an activation's derivative, as in `memopt.kernels.derivative_codes.codes`.
CodeScheme = Literal["none", "published", "2bit", "3bit", "4bit", "8bit"]


class ActivationRules(Rules):
    """How activations are rewritten."""

    key = "activations"
    needs = (("where", "code", get_args(CodeScheme)[1:]),)

    method: Literal["recompute", "none"] = "recompute"
    """Whether backward recomputes the outputs of activations instead of reading saved ones."""
    code: CodeScheme = "none"
    """Save a code of the derivative, with so many bits an element, instead of the input. This is approximate."""
    where: Literal["needed", "all"] = "needed"
    """``needed``: save a code only if nothing saves the output; otherwise recomputing saves as much and is exact."""
    relu: Literal["none", "mask"] = "none"
    """``mask``: a ReLU saves one bit an element if nothing else saves its output. This is exact."""

    @property
    def effect(self) -> Effect:
        return "exact" if self.is_off or self.code == OFF else "approximate"


_BEHIND_NORM = "its output is recomputed where it reads a norm's, which is recomputed too"


class ActivationPatch(Patch, Checks):
    """Recomputed and coded activations."""

    name = "activation"
    after = ("gated_mlp",)
    requires = ("derivative_codes",)
    rows = Rows(
        "activation",
        {"recompute": "recomputed", "code": "coded"},
        noun="activation",
        plural="activations",
        sites="activations",
    )
    rules = ActivationRules

    def decide(self, site: ActivationSite, plan: PlanView) -> tuple[str, str]:
        rules, recipe = plan.recipe.rules(ActivationRules), plan.recipe
        gated = site.gated_mlp is not None and recipe.selects(site.gated_mlp)
        if rules.is_off:
            return LEFT, "the recipe does not patch activations"
        if not recipe.selects(site.name):
            return LEFT, EXCLUDED
        if site.saves_its_output and not gated:
            return _of_kept_output(site, rules, plan.sites)
        if site.in_place and is_behind_norm(site, plan.sites):
            return "recompute", _BEHIND_NORM
        if site.in_place and not site.replays:
            return LEFT, "it writes into its input, from which it would be recomputed"
        if not site.replays:
            return LEFT, "random, or different in train mode or with gradients: it cannot be recomputed"
        if site.is_module and site.operations > 1 and site.name in plan.sites.overwritten:
            return LEFT, OVERWRITTEN
        if rules.code != OFF and (kept := _code(site, rules, gated)):
            return "code", kept
        if gated:
            return "recompute", f"part of the gated MLP {site.gated_mlp}"
        if site.is_module and site.operations > 1:
            return "recompute", f"keeps its input instead of {site.operations} intermediates"
        if site.next_linear is None:
            return LEFT, "no linear keeps its output: nothing to save"
        if site.copied and not site.is_module:
            why = "a function, and the next linear saves a copy of its output: nothing shows whether the copy is equal"
            return LEFT, why
        return "recompute", "its output is recomputed from its input, which is kept anyway"

    def scope(self, plan: PlanView) -> InScopes:
        modules = {linear.parameter: linear.module for linear in plan.sites.linears}
        chosen, coded = plan.chosen("activation"), plan.chosen("activation", "code")
        readers = [modules[site.next_linear] for site in chosen if site.next_linear in modules]
        # A scope that contains both a coded activation and the linear that reads its output.
        readers += [_around(site.name, modules.get(site.next_linear or "")) for site in coded]
        rewritten = {entry.site for entry in plan.rewrites}
        left = [
            modules[site.next_linear]
            for site in plan.sites.activations
            if site.next_linear in modules
            and site.gated_mlp is None
            and site.name not in rewritten
            # An activation that saves its output needs no rewrite, but a dropped-out copy of the output can be
            # recomputed.
            and not (site.saves_its_output and plan.recipe.selects(site.name))
        ]
        return InScopes(
            families=frozenset() if plan.recipe.rules(ActivationRules).is_off else frozenset({ELEMENTWISE}),
            outside=readers,
            excluded=dict.fromkeys(left, frozenset({ELEMENTWISE})),
            exchanges=bool(coded),
        )

    def saves(self, plan: PlanView, outputs: Mapping[str, Sequence[Output]]) -> Saves:
        names = [site.name for site in plan.chosen("activation", "recompute") if site.is_module]
        return Saves(copies=names, recomputed=names)

    def apply(self, live: Live) -> None:
        from memopt.patches.activation.module import patch_activation
        from memopt.patches.replay import patch_replay

        rules, plan = live.plan.recipe.rules(ActivationRules), live.plan
        coded = plan.chosen("activation", "code")
        for site in coded:
            live.attempt(self.name, site.name, patch_activation, site, rules)
        for site in plan.chosen("activation"):
            if not site.is_module or not (site.replays or site.in_place) or site in coded:
                continue
            if not (site.gains_alone or site.copied or is_behind_norm(site, plan.sites)):
                continue
            if site.parameters:
                live.attempt(self.name, site.name, patch_replay)
            else:
                live.attempt(self.name, site.name, patch_activation, site)

    def farthest(self, recipe: RecipeView) -> tuple[str, ...]:
        return ("activations.where=all",)

    def repeatable(self, recipe: RecipeView) -> tuple[str, ...]:
        return ("activations.where=all",)

    def checks(self, trial: Trial) -> Iterable[Check]:
        if trial.recipe.rules(ActivationRules).code == OFF:
            return ()
        from memopt.patches.activation.checks import verify_codes

        return verify_codes(trial, self.farthest(trial.recipe))

    def derivative_errors(self, model: nn.Module) -> AbstractContextManager[list[float]]:
        from memopt.patches.activation.checks import code_errors

        return code_errors(model)


def is_behind_norm(site: ActivationSite, sites: Sites) -> bool:
    """Whether a ReLU, or any activation in place, may read a norm's output, which is recomputed from the norm's
    input."""
    if not site.reads_recomputed or not (site.in_place or site.saves_its_output):
        return False
    around = parent(site.name)
    # There is no scope around the model itself.
    is_near = bool(around) and (around in sites.batch_norms or around in map(parent, sites.batch_norms))
    return is_near or any(site.name in norm.activations for norm in sites.norms)


def _of_kept_output(site: ActivationSite, rules: ActivationRules, sites: Sites) -> tuple[str, str]:
    if site.kind == "relu" and rules.relu != OFF and site.is_module and site.replays:
        return "code", "keeps one bit an element where nothing else keeps its output, which is exact"
    if is_behind_norm(site, sites):
        return "recompute", _BEHIND_NORM
    if site.copied and site.next_linear is not None:
        why = "the copy of its output that the next linear reads is recomputed from the output, which is kept anyway"
        return "recompute", why
    return LEFT, f"{site.kind} already keeps its output only, which the next linear shares"


def _code(site: ActivationSite, rules: ActivationRules, gated: bool) -> str | None:
    """The reason in the row of an activation that saves a code of its derivative; None if it saves no code."""
    # Imported here because most recipes have no codes.
    from memopt.kernels.derivative_codes.codes import derivative_code

    if not site.is_module or site.parameters or site.linear is not None or (gated and rules.where == "needed"):
        return None
    if site.kind == "other" and rules.code != "published":
        kept = f"a code of its derivative ({rules.code}), fitted when it is patched"
    else:
        try:
            code = derivative_code(site.kind, rules.code)
        except ValueError:
            return None
        kept = f"{code.bits} bits an element (its input has 16 in bf16), its derivative {code.error:.1%} off at N(0, 1)"
    if rules.where == "all":
        return f"keeps {kept}"
    return f"where nothing keeps its output: {kept}; else recomputed from its input, exactly"


def _around(name: str, reader: str | None) -> str:
    """The innermost module that `name` and `reader` are in."""
    ancestor = parent(name)
    while reader is not None and not is_inside(reader, ancestor):
        ancestor = parent(ancestor)
    return ancestor


PATCH = ActivationPatch()
