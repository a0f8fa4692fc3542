"""Functions of a model's own code that save more than their arguments: they run again in backward."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from memopt.patches.base import EXCLUDED, LEFT, InScopes, Patch, PlanView, Rows, Rules
from memopt.patches.capabilities import Checks
from memopt.walk.sites import FunctionSite


class ReplayedFunctionRules(Rules):
    """Whether pure functions of a model's code run again in backward."""

    key = "functions"

    method: Literal["none", "recompute"] = "none"
    """``recompute``: their intermediate results are not saved; their forward runs once more in backward."""


class ReplayedFunctionPatch(Patch, Checks):
    """Functions of linear attention, state space models and the like, unless a kernel of another package runs."""

    name = "replayed_function"
    after = ("activation", "softmax")
    rows = Rows(
        "function",
        {"recompute": "run again"},
        noun="module with replayed functions",
        plural="modules with replayed functions",
        sites="functions",
    )
    rules = ReplayedFunctionRules

    def decide(self, site: FunctionSite, plan: PlanView) -> tuple[str, str]:
        called = ", ".join(name for _, name in site.functions)
        if plan.recipe.rules(ReplayedFunctionRules).is_off:
            return LEFT, f"{called} saves more than its arguments; not rewritten by this recipe"
        if not plan.recipe.selects(site.name):
            return LEFT, EXCLUDED
        if plan.sites.surrounds_blocks(site.name):
            return LEFT, "called outside the blocks"
        if any(each.name == site.name and each.is_module for each in plan.chosen("activation")):
            return LEFT, "its module is one activation, which is rewritten as a whole"
        return "recompute", f"{called}: keeps its arguments and runs again, where no kernel is installed for it"

    def scope(self, plan: PlanView) -> InScopes:
        chosen = plan.chosen("function")
        if not chosen:
            return InScopes()
        from memopt.patches.replayed_function.module import ReplayedFunctions

        return InScopes(modes={site.name: ReplayedFunctions(site.functions) for site in chosen})

    def frees(self, plan: PlanView) -> Collection[str]:
        return [site.name for site in plan.chosen("function")]


PATCH = ReplayedFunctionPatch()
