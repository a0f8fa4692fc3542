"""Saved tensors that are not recomputed, quantised when their block is done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from memopt.patches.base import OFF, Effect, Patch, PlanView, RecipeView, Rules, Trial

if TYPE_CHECKING:
    from memopt.checks import Check
    from memopt.saved.compressible import Compression


class CompressionRules(Rules):
    """How saved tensors are stored that are not recomputed."""

    method: Literal["none", "int8"] = "none"
    """``int8``: a byte for each element, a minimum and a step for each 128; rounded at random, without bias."""
    where: Literal["block", "mlp"] = "block"
    """Everything in the repeated blocks, or what their MLPs keep."""

    old_key: ClassVar[str] = "kept"
    old_spellings: ClassVar[Mapping[str, Mapping[str, str]]] = {"method": {"exact": OFF, "int4": "int8"}}
    old_fields: ClassVar[frozenset[str]] = frozenset({"rounding"})

    @property
    def effect(self) -> Effect:
        return "exact" if self.is_off else "approximate"


class CompressionPatch(Patch):
    """Scopes that quantise; a matter of blocks, so it has no rows."""

    name = key = "compression"
    rules = CompressionRules
    after = ("dropout", "sampled_linear")  # it stores what they leave
    requires = ("quantize",)

    def compression(self, recipe: RecipeView) -> Compression | None:
        if recipe.rules(CompressionRules).is_off:
            return None
        from memopt.patches.compression.compressor import Compressor

        return Compressor

    def settles(self, plan: PlanView) -> bool:
        return not plan.recipe.rules(CompressionRules).is_off

    def compressed(self, plan: PlanView) -> Iterable[str]:
        """Blocks, or the MLPs in them."""
        rules, sites = plan.recipe.rules(CompressionRules), plan.sites
        if rules.is_off:
            return ()
        if rules.where == "block":
            return sites.blocks
        parents = (site.name.rpartition(".")[0] if site.is_module else site.name for site in sites.activations)
        return (*(site.name for site in sites.gated_mlps), *parents)

    def alike(self, recipe: RecipeView) -> tuple[str, ...]:
        return (f"{self.key}.method={OFF}",)

    def checks(self, trial: Trial) -> Iterable[Check]:
        if trial.recipe.rules(CompressionRules).is_off:
            return ()
        from memopt.patches.compression.checks import verify_rounding

        return verify_rounding(trial)


PATCH = CompressionPatch()
