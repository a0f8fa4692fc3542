"""Saved tensors that are not recomputed, quantised when their block is done."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from memopt.patches.base import OFF, Effect, InScopes, Patch, PlanView, RecipeView, Rules
from memopt.patches.capabilities import Checks, Trial
from memopt.walk.sites import parent

if TYPE_CHECKING:
    from memopt.checks import Check
    from memopt.patches.compression.compressor import Compression


class KeptRules(Rules):
    """How saved tensors are stored that are not recomputed."""

    key = "kept"

    method: Literal["none", "int8", "int4"] = "none"
    """``int8``, ``int4``: a code for each element, a minimum and a step for each 128."""
    where: Literal["block", "mlp"] = "block"
    """Everything in the repeated blocks, or what their MLPs keep."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"

    old_spellings: ClassVar[Mapping[str, Mapping[str, str]]] = {"method": {"exact": OFF}}

    @property
    def effect(self) -> Effect:
        return "exact" if self.is_off else "approximate"


class CompressionPatch(Patch, Checks):
    """Scopes that quantise; a matter of blocks, so it has no rows."""

    name = "compression"
    after = ("dropout", "sampled_linear")  # it stores what they leave
    requires = ("quantize",)
    rules = KeptRules

    def scope(self, plan: PlanView) -> InScopes:
        compression = _compression(plan.recipe.rules(KeptRules))
        if compression is None:
            return InScopes()
        return InScopes(compression=compression, compressed=_compressed(plan), exchanges=True)

    def repeatable(self, recipe: RecipeView) -> tuple[str, ...]:
        return (f"{KeptRules.key}.method={OFF}",)

    def checks(self, trial: Trial) -> Iterable[Check]:
        compression = _compression(trial.recipe.rules(KeptRules))
        if compression is None:
            return ()
        from memopt.patches.compression.checks import verify_rounding

        return verify_rounding(trial, compression)


def _compression(rules: KeptRules) -> Compression | None:
    if rules.is_off:
        return None
    from memopt.patches.compression.compressor import Compression

    return Compression(8 if rules.method == "int8" else 4, rules.rounding == "stochastic")


def _compressed(plan: PlanView) -> Collection[str]:
    """Blocks, or the MLPs in them."""
    sites = plan.sites
    if plan.recipe.rules(KeptRules).where == "block":
        return sites.blocks
    parents = (parent(site.name) if site.is_module else site.name for site in sites.activations)
    return dict.fromkeys((*(site.name for site in sites.gated_mlps), *parents))


PATCH = CompressionPatch()
