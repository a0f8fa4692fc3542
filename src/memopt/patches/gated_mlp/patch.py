"""Gated MLPs: act(gate) * up is recomputed from gate and up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from memopt.patches.base import EXCLUDED, LEFT, InScopes, Live, Patch, PlanView, Rows, Rules
from memopt.patches.capabilities import Checks, Output, Saves
from memopt.recompute.rules import ELEMENTWISE, PRODUCT
from memopt.walk.sites import GatedMLPSite


class GatedMLPRules(Rules):
    """Whether act(gate) and the product are recomputed in backward instead of kept."""

    key = "gated_mlps"

    method: Literal["recompute", "none"] = "recompute"


class GatedMLPPatch(Patch, Checks):
    """Gated MLPs. If the module computes nothing else, its activation and product run as one operator."""

    name = "gated_mlp"
    after = ("norm",)
    requires = ("activation", "linear")
    rows = Rows("gated_mlp", {"recompute": "recomputed"}, noun="gated MLP", plural="gated MLPs", sites="gated_mlps")
    rules = GatedMLPRules

    def decide(self, site: GatedMLPSite, plan: PlanView) -> tuple[str, str]:
        if plan.recipe.rules(GatedMLPRules).is_off:
            return LEFT, "the recipe leaves gated MLPs alone"
        if not plan.recipe.selects(site.name):
            return LEFT, EXCLUDED
        what = "the product is" if plan.recipe.is_off("activations") else "act(gate) and the product are"
        return "recompute", f"{what} recomputed from gate and up"

    def scope(self, plan: PlanView) -> InScopes:
        rewritten = {entry.site for entry in plan.rewrites}
        names = [site.name for site in plan.sites.gated_mlps]
        left = [name for name in names if name not in rewritten]
        return InScopes(
            families=frozenset() if plan.recipe.rules(GatedMLPRules).is_off else frozenset({PRODUCT}),
            outside=[name for name in names if name in rewritten],
            excluded=dict.fromkeys(left, frozenset({PRODUCT, ELEMENTWISE})),
        )

    def saves(self, plan: PlanView, outputs: Mapping[str, Sequence[Output]]) -> Saves:
        return Saves(recomputed=[site.name for site in plan.chosen("gated_mlp")])

    def apply(self, live: Live) -> None:
        from memopt.patches.gated_mlp.module import patch_gated_mlp
        from memopt.patches.scope import innermost

        plan = live.plan
        if plan.recipe.is_off("activations"):  # the recipe saves act(gate), which the operator would recompute
            return
        # The operator saves gate and up, so the stock operations run where the recipe saves codes instead.
        coded = {site.gated_mlp for site in plan.chosen("activation", "code")}
        for site in plan.chosen("gated_mlp"):
            if site.form is not None and site.name not in coded:
                live.attempt(self.name, site.name, patch_gated_mlp, site, innermost(site.name, live.scopes))


PATCH = GatedMLPPatch()
