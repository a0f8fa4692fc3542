"""Norms that save x_hat instead of their input; the linears that read the norm save the same storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from memopt.patches.base import EXCLUDED, LEFT, OFF, OVERWRITTEN, InScopes, Live, Patch, PlanView, Rows, Rules
from memopt.patches.capabilities import Checks, Output, Saves
from memopt.recompute.rules import NORMALISED
from memopt.walk.sites import BATCH_STATISTICS, NormSite, Sites

#: The setting that folds norms with cautions.
CHANGE_HIDDEN_STATES = "norms.hidden_states=change"


class NormRules(Rules):
    """How norms are rewritten."""

    key = "norms"

    method: Literal["share", "none"] = "share"
    """``share``: save the normalised x_hat, one storage for the norm and every linear that reads it."""
    fold: Literal["auto", "none"] = "auto"
    """``auto``: fold the affine into the next linears if the fold is proved not to change the logits."""
    hidden_states: Literal["keep", "change"] = "keep"
    """``change``: also fold if that changes a hidden state that the model or an inner model returns; logits never
    change."""

    @property
    def folds(self) -> bool:
        return self.fold != OFF

    @property
    def changes_outputs(self) -> bool:
        return self.folds and self.hidden_states == "change"

    def in_memory(self) -> Mapping[str, str]:
        return {"fold": OFF}


class NormPatch(Patch, Checks):
    """Shared and folded norms; norms without a known formula run their own forward again."""

    name = "norm"
    rows = Rows(
        "norm",
        {"fold": "folded", "share": "shared", "recompute": "recomputed"},
        noun="norm",
        plural="norms",
        fold="fold",
        unfolded="share",
    )
    rules = NormRules

    def propose(self, sites: Sites) -> Iterator[tuple[str, NormSite | str]]:
        """Norms; and modules that resemble norms, each with the reason why it is left alone."""
        yield from ((norm.name, norm) for norm in sites.norms)
        yield from ((name, reason) for name, reason in sites.skipped if reason != BATCH_STATISTICS)

    def decide(self, site: NormSite | str, plan: PlanView) -> tuple[str, str]:
        return (LEFT, site) if isinstance(site, str) else _decide(site, plan)

    def scope(self, plan: PlanView) -> InScopes:
        norms = plan.chosen("norm")
        replayed = {norm.name for norm in norms if not norm.has_formula}
        readers = [consumer.module for norm in norms for consumer in norm.consumers]
        readers += [linear.module for linear in plan.sites.linears if linear.fed_by in replayed]
        readers += [name for norm in norms if norm.name in replayed for name in norm.activations]
        is_off = plan.recipe.rules(NormRules).is_off
        return InScopes(families=frozenset() if is_off else frozenset({NORMALISED}), outside=readers)

    def saves(self, plan: PlanView, outputs: Mapping[str, Sequence[Output]]) -> Saves:
        """x_hat, a statistic for each row in at least fp32, and a copy of weight and bias."""
        chosen = plan.chosen("norm")
        norms = [norm.name for norm in chosen if norm.has_formula]
        own = {
            name: sum(
                call.rows * (call.width * call.itemsize + max(call.itemsize, 4))
                + 2 * call.width * max(call.itemsize, 4)
                for call in outputs[name]
            )
            for name in norms
            if name in outputs
        }
        return Saves(own, [norm.name for norm in chosen if not norm.has_formula], norms)

    def apply(self, live: Live) -> None:
        from memopt.patches.norm.module import patch_norm
        from memopt.patches.replay import patch_replay

        for norm in live.plan.chosen("norm"):
            rewrite: Any = patch_norm if norm.has_formula else patch_replay
            live.attempt(self.name, norm.name, rewrite, norm, folded=norm.name in live.folded)


def _decide(norm: NormSite, plan: PlanView) -> tuple[str, str]:
    rules = plan.recipe.rules(NormRules)
    if rules.is_off:
        return LEFT, "the recipe does not patch norms"
    if not plan.recipe.selects(norm.name):
        return LEFT, EXCLUDED
    is_read = norm.activations or any(each.fed_by == norm.name for each in plan.sites.linears)
    if not (norm.has_formula or norm.intermediates or is_read):
        return LEFT, "it saves only its input, and no linear, convolution or activation saves its output"
    if not norm.has_formula and norm.name in plan.sites.overwritten:
        return LEFT, OVERWRITTEN
    # Without a formula no x_hat is shared: the module saves its inputs, and its own forward runs again.
    action = "share" if norm.has_formula else "recompute"
    if norm.weight is None:
        kept = "its output is kept once, for itself and the linears that read it"
        return (
            action,
            f"it has no affine: {kept}" if norm.has_formula else "it keeps its input and runs again in backward",
        )
    if not rules.folds:
        return action, "the recipe keeps the affine"
    cautions = "; ".join(norm.cautions)
    if norm.foldable or (norm.foldable_with_cautions and rules.hidden_states == "change"):
        readers = ", ".join(sorted({consumer.parameter for consumer in norm.consumers}))
        return "fold", f"into {readers}" + (f"; changes a hidden state: {cautions}" if cautions else "")
    if norm.foldable_with_cautions:
        return action, f"not folded: {cautions}; `--set {CHANGE_HIDDEN_STATES}` folds it"
    return action, "not folded: " + "; ".join((*norm.fold_obstacles, *norm.cautions))


PATCH = NormPatch()
