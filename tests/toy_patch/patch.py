"""What a plan needs of the toy patch: its rules, and what happens to its sites."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from memopt.patches.base import EXCLUDED, LEFT, Live, Patch, PlanView, Rows, Rules
from memopt.walk.sites import Sites
from tests.toy_patch.site import ToySite


class ToyRules(Rules):
    """How toys are rewritten."""

    key = "toys"

    method: Literal["none", "shrink"] = "none"


class ToyPatch(Patch):
    """Modules that compute x * sigmoid(1.702 x) of their own."""

    name = "toy_patch"
    after = ("activation",)
    rows = Rows("toy", {"shrink": "shrunk"}, noun="toy gate", plural="toy gates")
    rules = ToyRules

    def propose(self, sites: Sites) -> Iterator[tuple[str, ToySite]]:
        return ((site.name, site) for site in sites.of(ToySite))

    def decide(self, site: ToySite, plan: PlanView) -> tuple[str, str]:
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
