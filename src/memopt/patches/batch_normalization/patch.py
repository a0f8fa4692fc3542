"""Batch norms, whose output is recomputed from their input and the statistics, which they save anyway."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from memopt.patches.base import EXCLUDED, LEFT, Patch, PlanView, RecipeView
from memopt.patches.norm.patch import NormRules
from memopt.recompute.rules import NORMALISED
from memopt.walk.sites import Sites, parent


class BatchNormalizationPatch(Patch):
    """The modules stay stock: in a scope, what reads their output saves a handle (`memopt.recompute.operations`)."""

    name = kind = "batch_normalization"
    noun, plural = "batch norm", "batch norms"
    requires = ("norm",)
    actions: ClassVar[Mapping[str, str]] = {"recompute": "recomputed"}

    def propose(self, sites: Sites) -> Iterator[tuple[str, str]]:
        return ((name, name) for name in sites.batch_norms)

    def decide(self, site: str, plan: PlanView) -> tuple[str, str]:
        if plan.recipe.rules(NormRules).is_off:
            return LEFT, "the recipe leaves norms alone"
        if not plan.recipe.selects(site):
            return LEFT, EXCLUDED
        return "recompute", "its output is recomputed from its input and the statistics of the forward"

    def families(self, recipe: RecipeView) -> frozenset[str]:
        return frozenset() if recipe.rules(NormRules).is_off else frozenset({NORMALISED})

    def scoped(self, plan: PlanView) -> Iterable[str]:
        # Convolution, norm and activation are often one module, and who reads its output stands beside it.
        return (parent(parent(name)) or parent(name) for name in plan.chosen(self.kind))


PATCH = BatchNormalizationPatch()
