"""The softmax of attention in a model's own code: its output is recomputed in backward."""

from __future__ import annotations

from typing import Literal

from memopt.patches.base import EXCLUDED, LEFT, InScopes, Patch, PlanView, Rows, Rules
from memopt.recompute.rules import PROBABILITIES


class SoftmaxRules(Rules):
    """Whether the probabilities of attention are saved."""

    key = "softmaxes"

    method: Literal["none", "recompute"] = "none"
    """``recompute``: backward computes them again from queries and keys, by one more product and softmax."""


class SoftmaxPatch(Patch):
    """Modules whose forward calls a softmax. Fused attention saves no probabilities and is not patched."""

    name = "softmax"
    after = ("dropout",)
    rows = Rows("softmax", {"recompute": "recomputed"}, noun="softmax", plural="softmaxes", sites="softmaxes")
    rules = SoftmaxRules

    def decide(self, site: str, plan: PlanView) -> tuple[str, str]:
        if plan.recipe.rules(SoftmaxRules).is_off:
            return LEFT, "probabilities are saved; not rewritten by this recipe"
        if not plan.recipe.selects(site):
            return LEFT, EXCLUDED
        # A mode outside the blocks would see every function of the model because of one softmax.
        if plan.sites.surrounds_blocks(site):
            return LEFT, "called outside the blocks"
        return "recompute", "its output is recomputed from queries and keys, which their product saves anyway"

    def scope(self, plan: PlanView) -> InScopes:
        if plan.recipe.rules(SoftmaxRules).is_off:
            return InScopes()
        from memopt.patches.softmax.module import RecomputedSoftmaxes

        names = plan.chosen(self.name)
        modes = {name: RecomputedSoftmaxes() for name in names}
        return InScopes(families=frozenset({PROBABILITIES}), outside=names, modes=modes)


PATCH = SoftmaxPatch()
