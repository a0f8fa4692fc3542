"""Saved tensors that are not recomputed are quantised, while their block runs or when it returns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Literal

from memopt.patches.base import OFF, Effect, InScopes, Patch, PlanView, RecipeView, Rules
from memopt.patches.capabilities import Checks, Trial
from memopt.walk.sites import is_inside, parent

if TYPE_CHECKING:
    from memopt.patches.checks import Check


class CompressionRules(Rules):
    """How to store saved tensors that are not recomputed."""

    key = "compression"

    method: Literal["none", "int8"] = "none"
    """``int8``: a byte for each element, a minimum and a step for each 128; rounded at random, without bias."""
    where: Literal["block", "mlp"] = "block"
    """``block``: all such tensors of the repeated blocks; ``mlp``: only such tensors of MLPs that are modules."""

    @property
    def effect(self) -> Effect:
        return "exact" if self.is_off else "approximate"


class CompressionPatch(Patch, Checks):
    """Scopes that quantise saved tensors. They belong to blocks, not to sites, so there are no rows."""

    name = "compression"
    rules = CompressionRules
    after = ("dropout", "sampled_linear")  # it quantises tensors that these patches still save
    requires = ("quantize",)

    def notes(self, plan: PlanView) -> Iterator[str]:
        rules, sites = plan.recipe.rules(CompressionRules), plan.sites
        if rules.is_off:
            return
        if rules.where == "block":
            if inside := [name for name in sites.softmaxes if not sites.surrounds_blocks(name)]:
                yield (
                    f"Recipe '{plan.recipe.name}' keeps probabilities of {len(inside)} attentions, a byte for each "
                    "pair of tokens. Exact recipes keep none of them, and so keep less at long sequences."
                )
            return
        selected = {block for block in sites.blocks if plan.recipe.selects(block)} & {*_around_activations(plan)}
        compressed = _compressed(plan)
        exact = [block for block in selected if not any(is_inside(name, block) for name in compressed)]
        if exact:
            yield (
                f"{len(exact)} blocks have no module for their MLP, so nothing of them is kept in 8 bits "
                f"({min(exact)}, for one). Recipe 'int8' compresses whole blocks, with a larger error."
            )

    def scope(self, plan: PlanView) -> InScopes:
        if plan.recipe.rules(CompressionRules).is_off:
            return InScopes()
        from memopt.patches.compression.compressor import Compressor

        return InScopes(compression=Compressor, compressed=_compressed(plan), exchanges=True)

    def repeatable(self, recipe: RecipeView) -> tuple[str, ...]:
        return (f"{CompressionRules.key}.method={OFF}",)

    def checks(self, trial: Trial) -> Iterable[Check]:
        if trial.recipe.rules(CompressionRules).is_off:
            return ()
        from memopt.patches.compression.checks import verify_rounding

        return verify_rounding(trial)


def _compressed(plan: PlanView) -> Collection[str]:
    """Modules whose saved tensors are quantised: the blocks, or the MLPs in them."""
    sites = plan.sites
    if plan.recipe.rules(CompressionRules).where == "block":
        return sites.blocks
    found = dict.fromkeys((*(site.name for site in sites.gated_mlps), *_around_activations(plan)))
    # Nor is a module with batch norms an MLP: ReLUs that are recomputed from their outputs take fewer bytes.
    others = (*sites.blocks, *sites.batch_norms)
    return [name for name in found if not any(is_inside(other, name) for other in others)]


def _around_activations(plan: PlanView) -> Iterator[str]:
    return (parent(site.name) if site.is_module else site.name for site in plan.sites.activations)


PATCH = CompressionPatch()
