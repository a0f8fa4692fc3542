"""Saved tensors that are not recomputed, quantised when their block is done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from memopt.patches.base import OFF, Effect, Patch, PlanView, RecipeView, Rules, Trial

if TYPE_CHECKING:
    from memopt.checks import Check
    from memopt.saved.compressible import Compression


class KeptRules(Rules):
    """How saved tensors are stored that are not recomputed."""

    method: Literal["none", "int8", "int4"] = "none"
    """``int8``, ``int4``: a code for each element, a minimum and a step for each 128."""
    where: Literal["block", "mlp"] = "block"
    """Everything in the repeated blocks, or what their MLPs keep."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"

    old_spellings: ClassVar[Mapping[str, Mapping[str, str]]] = {"method": {"exact": OFF}}

    @property
    def effect(self) -> Effect:
        return "exact" if self.is_off else "approximate"


class CompressionPatch(Patch):
    """Scopes that quantise; a matter of blocks, so it has no rows."""

    name = "compression"
    after = ("dropout", "sampled_linear")  # it stores what they leave
    requires = ("quantize",)
    key, rules = "kept", KeptRules

    def compression(self, recipe: RecipeView) -> Compression | None:
        rules = recipe.rules(KeptRules)
        if rules.method == "none":
            return None
        from memopt.patches.compression.compressor import Compression

        return Compression(8 if rules.method == "int8" else 4, rules.rounding == "stochastic")

    def settles(self, plan: PlanView) -> bool:
        return self.compression(plan.recipe) is not None

    def compressed(self, plan: PlanView) -> Iterable[str]:
        """Blocks, or the MLPs in them."""
        rules, sites = plan.recipe.rules(KeptRules), plan.sites
        if rules.is_off:
            return ()
        if rules.where == "block":
            return sites.blocks
        parents = (site.name.rpartition(".")[0] if site.is_module else site.name for site in sites.activations)
        return (*(site.name for site in sites.gated_mlps), *parents)

    def alike(self, recipe: RecipeView) -> tuple[str, ...]:
        return (f"{self.key}.method={OFF}",)

    def checks(self, trial: Trial) -> Iterable[Check]:
        from memopt.patches.compression.compressor import Compression

        compression = self.compression(trial.recipe)
        if not isinstance(compression, Compression):
            return ()
        from memopt.patches.compression.checks import verify_rounding

        return verify_rounding(trial, compression)


PATCH = CompressionPatch()
