"""Gated MLPs: act(gate) * up is recomputed from gate and up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from memopt.patches.activation.rules import ActivationRules
from memopt.patches.base import EXCLUDED, LEFT, Live, Patch, PlanView, RecipeView, Rules
from memopt.recompute.rules import ELEMENTWISE, PRODUCT
from memopt.walk.sites import GatedMLPSite, Sites


class GatedMLPRules(Rules):
    """Whether act(gate) and the product are recomputed in backward instead of kept."""

    method: Literal["recompute", "none"] = "recompute"


class GatedMLPPatch(Patch):
    """Where the module computes nothing else, activation and product run as one operator."""

    name = kind = "gated_mlp"
    noun, plural = "gated MLP", "gated MLPs"
    after = ("norm",)
    requires = ("activation", "linear")
    actions: ClassVar[Mapping[str, str]] = {"recompute": "recomputed"}
    key, rules = "gated_mlps", GatedMLPRules

    def propose(self, sites: Sites) -> Iterator[tuple[str, GatedMLPSite]]:
        return ((site.name, site) for site in sites.gated_mlps)

    def decide(self, site: GatedMLPSite, plan: PlanView) -> tuple[str, str]:
        if plan.recipe.rules(GatedMLPRules).is_off:
            return LEFT, "the recipe leaves gated MLPs alone"
        if not plan.recipe.selects(site.name):
            return LEFT, EXCLUDED
        exact = plan.recipe.rules(ActivationRules).is_off
        what = "the product is" if exact else "act(gate) and the product are"
        return "recompute", f"{what} recomputed from gate and up"

    def families(self, recipe: RecipeView) -> frozenset[str]:
        return frozenset() if recipe.rules(GatedMLPRules).is_off else frozenset({PRODUCT})

    def scoped(self, plan: PlanView) -> Iterator[str]:
        rewritten = {entry.site for entry in plan.rewrites}
        return (site.name for site in plan.sites.gated_mlps if site.name in rewritten)

    def unscoped(self, plan: PlanView) -> Mapping[str, frozenset[str]]:
        rewritten = {entry.site for entry in plan.rewrites}
        left = (site.name for site in plan.sites.gated_mlps if site.name not in rewritten)
        return dict.fromkeys(left, frozenset({PRODUCT, ELEMENTWISE}))

    def recomputed(self, plan: PlanView) -> Iterator[str]:
        yield from (site.name for site in plan.chosen("gated_mlp"))

    def apply(self, live: Live) -> None:
        from memopt.patches.gated_mlp.module import patch_gated_mlp
        from memopt.patches.scopes import innermost

        plan = live.plan
        if plan.recipe.rules(ActivationRules).is_off:  # act(gate) is to be kept
            return
        # The operator keeps gate and up, so where the recipe wants codes instead, the stock operations run.
        coded = {site.gated_mlp for site in plan.chosen("activation", "code")}
        for site in plan.chosen("gated_mlp"):
            if site.form is not None and site.name not in coded:
                live.attempt(self.name, site.name, patch_gated_mlp, site, innermost(site.name, live.scopes))


PATCH = GatedMLPPatch()
