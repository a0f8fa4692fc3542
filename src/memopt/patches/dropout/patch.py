"""Dropouts that keep the seed of their mask instead of the mask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from memopt.patches.base import EXCLUDED, LEFT, Live, Patch, PlanView, Rules
from memopt.walk.sites import DropoutSite, Sites


class DropoutRules(Rules):
    """How dropouts are rewritten."""

    method: Literal["none", "seed"] = "none"
    """``seed``: keep the seed of the mask instead of the mask. The same distribution, other random numbers."""


class DropoutPatch(Patch):
    """Seeded dropouts."""

    name = kind = noun = "dropout"
    plural = "dropouts"
    after = ("sampled_linear",)
    actions: ClassVar[Mapping[str, str]] = {"seed": "seeded"}
    key, rules = "dropouts", DropoutRules

    def propose(self, sites: Sites) -> Iterator[tuple[str, DropoutSite]]:
        return ((site.name, site) for site in sites.dropouts)

    def decide(self, site: DropoutSite, plan: PlanView) -> tuple[str, str]:
        if site.probability == 0:
            return LEFT, "probability 0: keeps nothing"
        if plan.recipe.rules(DropoutRules).is_off:
            return LEFT, "keeps its mask; not rewritten by this recipe"
        if not plan.recipe.selects(site.name):
            return LEFT, EXCLUDED
        if not site.is_module:
            return LEFT, "a function in the forward of this module keeps its mask"
        return "seed", "keeps the seed of its mask"

    def apply(self, live: Live) -> None:
        from memopt.patches.dropout.module import patch_dropout

        for site in live.plan.chosen("dropout"):
            live.attempt(self.name, site.name, patch_dropout)


PATCH = DropoutPatch()
