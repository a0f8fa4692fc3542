"""Chains of elementwise operations in a module's own code: they are recomputed from their first inputs."""

from __future__ import annotations

from collections.abc import Collection

from memopt.patches.base import EXCLUDED, LEFT, InScopes, Patch, PlanView, Rows
from memopt.patches.capabilities import Checks
from memopt.recompute.rules import ELEMENTWISE


class ChainsPatch(Patch, Checks):
    """Modules with such chains in their forward: gates of experts, gates of linear attention and the like."""

    name = "chains"
    after = ("activation",)
    rows = Rows(
        "chain", {"recompute": "recomputed"}, noun="elementwise chain", plural="elementwise chains", sites="chained"
    )

    def decide(self, site: str, plan: PlanView) -> tuple[str, str]:
        if plan.recipe.is_off("activations"):
            return LEFT, "the recipe does not patch activations"
        if not plan.recipe.selects(site):
            return LEFT, EXCLUDED
        if plan.sites.surrounds_blocks(site) or site in plan.sites.blocks:
            return LEFT, "in the code of a block, or around the blocks"
        return "recompute", "elementwise operations in its code save the tensors at their start, not their results"

    def scope(self, plan: PlanView) -> InScopes:
        names = plan.chosen("chain")
        if not names:
            return InScopes()
        from memopt.patches.chains.module import followed_chains

        return InScopes(families=frozenset({ELEMENTWISE}), modes=dict.fromkeys(names, followed_chains))

    def frees(self, plan: PlanView) -> Collection[str]:
        return plan.chosen("chain")


PATCH = ChainsPatch()
