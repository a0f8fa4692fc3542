"""Dropouts that save the seed of their mask instead of the mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from memopt.patches.base import EXCLUDED, LEFT, InScopes, Live, Patch, PlanView, Rows, Rules
from memopt.patches.capabilities import Reports
from memopt.walk.sites import DropoutSite

if TYPE_CHECKING:
    from torch import nn


class DropoutRules(Rules):
    """How dropouts are rewritten."""

    key = "dropouts"

    method: Literal["none", "seed"] = "none"
    """``seed``: save the seed of the mask instead of the mask. Masks have the same distribution, but other values."""


class DropoutPatch(Patch, Reports):
    """Seeded dropouts."""

    name = "dropout"
    after = ("linear", "sampled_linear")
    rows = Rows("dropout", {"seed": "seeded"}, noun="dropout", plural="dropouts", sites="dropouts")
    rules = DropoutRules

    def decide(self, site: DropoutSite, plan: PlanView) -> tuple[str, str]:
        if site.probability == 0:
            return LEFT, "probability 0: keeps nothing"
        if plan.recipe.rules(DropoutRules).is_off:
            return LEFT, "keeps its mask; not rewritten by this recipe"
        if not plan.recipe.selects(site.name):
            return LEFT, EXCLUDED
        if site.is_module:
            return "seed", "keeps the seed of its mask"
        # A mode outside the blocks would see every function of the model because of one dropout.
        if plan.sites.surrounds_blocks(site.name):
            return LEFT, "a function in the forward of this module keeps its mask"
        return "seed", "a function in the forward of this module keeps the seed of its mask"

    def remarks(self, model: nn.Module) -> Iterator[str]:
        from memopt.patches.swap import is_swapped
        from memopt.torch_compat import is_dropout

        drops = [module for module in model.modules() if is_dropout(module) and float(module.p) > 0]  # type: ignore[arg-type]
        if drops and not any(map(is_swapped, drops)):
            yield (
                f"dropouts that save a mask in train mode, and a dropped-out copy if an adapter reads it: {len(drops)}"
                "; the recipe setting dropouts.method=seed saves seeds: the same distribution, other random numbers"
            )

    def scope(self, plan: PlanView) -> InScopes:
        functions = [site.name for site in plan.chosen("dropout") if not site.is_module]
        if not functions:
            return InScopes()
        from memopt.patches.dropout.functions import seeded_in_training

        return InScopes(modes=dict.fromkeys(functions, seeded_in_training))

    def apply(self, live: Live) -> None:
        from memopt.patches.dropout.module import patch_dropout

        for site in live.plan.chosen("dropout"):
            if site.is_module:
                live.attempt(self.name, site.name, patch_dropout)


PATCH = DropoutPatch()
