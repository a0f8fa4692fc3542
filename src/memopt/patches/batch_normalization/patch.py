"""Batch norms: their output is recomputed from their input and statistics, which they save anyway."""

from __future__ import annotations

from memopt.patches.base import EXCLUDED, LEFT, InScopes, Patch, PlanView, Rows
from memopt.recompute.rules import NORMALISED
from memopt.walk.sites import parent

#: The recipe key of the rules for all norms.
_NORMS = "norms"


class BatchNormalizationPatch(Patch):
    """Batch norms stay stock. In a scope, readers of their output save a handle (`memopt.recompute.operations`)."""

    name = "batch_normalization"
    requires = ("norm",)
    rows = Rows(
        "batch_normalization", {"recompute": "recomputed"}, noun="batch norm", plural="batch norms", sites="batch_norms"
    )

    def decide(self, site: str, plan: PlanView) -> tuple[str, str]:
        if plan.recipe.is_off(_NORMS):
            return LEFT, "the recipe does not patch norms"
        if not plan.recipe.selects(site):
            return LEFT, EXCLUDED
        if not parent(site):
            return LEFT, "it stands in the model itself, around which there is no scope"
        return "recompute", "its output is recomputed from its input and the statistics of the forward"

    def scope(self, plan: PlanView) -> InScopes:
        # Convolution, norm and activation often share a parent; readers of its output are the parent's siblings.
        around = [parent(parent(name)) or parent(name) for name in plan.chosen(self.name)]
        families = frozenset[str]() if plan.recipe.is_off(_NORMS) else frozenset({NORMALISED})
        return InScopes(families=families, outside=around)


PATCH = BatchNormalizationPatch()
