"""What a plan needs of the toy patch: its rules, its sites and what happens to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from memopt.patches.base import EXCLUDED, LEFT, Live, Patch, PlanView, Rules
from memopt.walk.sites import ActivationSite, Sites


class ToyRules(Rules):
    """How toys are rewritten."""

    method: Literal["none", "shrink"] = "none"


class ToyPatch(Patch):
    """Modules that compute x * sigmoid(1.702 x) of their own."""

    name, kind = "toy_patch", "toy"
    noun, plural = "toy gate", "toy gates"
    after = ("activation",)
    actions: ClassVar[Mapping[str, str]] = {"shrink": "shrunk"}
    key, rules = "toys", ToyRules

    def propose(self, sites: Sites) -> Iterator[tuple[str, ActivationSite]]:
        return ((site.name, site) for site in sites.activations if site.kind == "quick_gelu" and site.is_module)

    def decide(self, site: ActivationSite, plan: PlanView) -> tuple[str, str]:
        if plan.recipe.rules(ToyRules).is_off:
            return LEFT, "toys are left alone"
        if not plan.recipe.selects(site.name):
            return LEFT, EXCLUDED
        return "shrink", "keeps its input only"

    def apply(self, live: Live) -> None:
        from tests.toy_patch.module import patch_toy

        for site in live.plan.chosen("toy"):
            live.attempt(self.name, site.name, patch_toy)


PATCH = ToyPatch()
