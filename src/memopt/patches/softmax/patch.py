"""Attention's softmax where a model computes it itself: its output is recomputed in backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from memopt.patches.base import EXCLUDED, LEFT, Live, Patch, PlanView, RecipeView, Rules
from memopt.recompute.rules import PROBABILITIES
from memopt.walk.sites import Sites

if TYPE_CHECKING:
    from memopt.patches.functions import Mode


class SoftmaxRules(Rules):
    """Whether the probabilities of attention are saved."""

    method: Literal["none", "recompute"] = "none"
    """``recompute``: recomputed from queries and keys, for one product and one softmax more in backward."""


class SoftmaxPatch(Patch):
    """Modules whose forward calls a softmax. Fused attention saves no probabilities; there nothing is done."""

    name = kind = noun = "softmax"
    plural = "softmaxes"
    after = ("dropout",)
    actions: ClassVar[Mapping[str, str]] = {"recompute": "recomputed"}
    key, rules = "softmaxes", SoftmaxRules

    def propose(self, sites: Sites) -> Iterator[tuple[str, str]]:
        return ((name, name) for name in sites.softmaxes)

    def decide(self, site: str, plan: PlanView) -> tuple[str, str]:
        if plan.recipe.rules(SoftmaxRules).is_off:
            return LEFT, "probabilities are saved; not rewritten by this recipe"
        if not plan.recipe.selects(site):
            return LEFT, EXCLUDED
        # What surrounds the blocks would look at every function of the model for one softmax.
        if not site or any(block.startswith(f"{site}.") for block in plan.sites.blocks):
            return LEFT, "called by what surrounds the blocks"
        return "recompute", "its output is recomputed from the scores' factors, which the product saves anyway"

    def families(self, recipe: RecipeView) -> frozenset[str]:
        return frozenset() if recipe.rules(SoftmaxRules).is_off else frozenset({PROBABILITIES})

    def scoped(self, plan: PlanView) -> Iterator[str]:
        yield from plan.chosen(self.kind)

    def mode(self, plan: PlanView, scope: str) -> Mode | None:
        if scope not in plan.chosen(self.kind):
            return None
        from memopt.patches.softmax.module import RecomputedSoftmaxes

        return RecomputedSoftmaxes()

    def apply(self, live: Live) -> None:
        from memopt.patches.functions import patch_functions
        from memopt.patches.softmax.module import RecomputedSoftmaxes

        for name in live.plan.chosen(self.kind):
            if name not in live.scopes:  # a scope has them in its modes
                live.attempt(self.name, name, patch_functions, RecomputedSoftmaxes())


PATCH = SoftmaxPatch()
