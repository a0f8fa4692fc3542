"""The loss over the vocabulary, computed without all logits in memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from memopt.patches.base import EXCLUDED, LEFT, OFF, InScopes, Live, Patch, PlanView, Rows, Rules
from memopt.patches.capabilities import Checks, Levels, Reports
from memopt.walk.sites import LossHead, Sites

if TYPE_CHECKING:
    from torch import nn

    from memopt.patches.checks import Check


class LossRules(Rules):
    """How the loss over the vocabulary is computed."""

    key = "loss"
    needs = (("room", "method", ("chunked",)),)

    method: Literal["none", "chunked", "lean"] = "none"
    """``chunked``: a part of the logits at a time. ``lean``: all logits in their own dtype, without an fp32 copy."""
    room: int = Field(default=0, ge=0)
    """MiB that the loss may take beside the gradients of the head's input and weight, if more than by default."""


class LossPatch(Patch, Levels, Checks, Reports):
    """The heads whose logits are computed a part at a time, inside the loss."""

    name = "loss"
    after = ("linear", "dropout")
    rows = Rows("loss", {"chunked": "chunked", "lean": "lean"}, noun="loss", plural="loss")
    rules = LossRules

    def propose(self, sites: Sites) -> Iterator[tuple[str, LossHead]]:
        return ((head.parameter, head) for head in sites.loss_heads)

    def decide(self, site: LossHead, plan: PlanView) -> tuple[str, str]:
        method = plan.recipe.rules(LossRules).method
        if site.obstacle:
            return LEFT, site.obstacle
        if method == OFF:
            return LEFT, "stock loss over all logits; not rewritten by this recipe"
        if not plan.recipe.selects(site.module):
            return LEFT, EXCLUDED
        if method == "lean":
            return method, "a cross-entropy keeps the logits in their own dtype, without an fp32 copy"
        reads = f"; reads: {', '.join(site.operations)}" if site.operations else ""
        return method, f"logits are never whole where the loss is a cross-entropy{reads}"

    def faster(self, plan: PlanView) -> Mapping[str, tuple[str, ...]]:
        return {"all logits in 16 bits": (f"{LossRules.key}.method=lean",)} if plan.chosen(self.name, "chunked") else {}

    def apply(self, live: Live) -> None:
        from memopt.patches.loss.module import head_of, patch_head, patch_that_contracts

        options = _options(live.plan)
        linears = {linear.parameter: linear for linear in live.plan.sites.linears}
        for head in live.plan.chosen("loss"):
            linear = linears[head.parameter]
            name = head_of(live.modules, head.module, linear.given_to, linear.width)
            rewrite = patch_that_contracts if name == head.module else patch_head
            live.attempt(self.name, name, rewrite, linear.width, head.vocab_size, **options)

    def scope(self, plan: PlanView) -> InScopes:
        if not plan.chosen(self.name):
            return InScopes()
        from memopt.patches.loss.module import look_at_heads

        return InScopes(look=functools.partial(look_at_heads, **_options(plan)))

    def remarks(self, model: nn.Module) -> Iterator[str]:
        from memopt.patches.loss.module import remarks_on, whole_logits

        yield from remarks_on(model)
        yield from whole_logits(model)

    def module_checks(self, modules: Mapping[str, nn.Module], limit: float) -> Iterator[Check]:
        from memopt.patches.loss.checks import verify_losses

        return verify_losses(modules, limit)


def _options(plan: PlanView) -> dict[str, Any]:
    rules = plan.recipe.rules(LossRules)
    return {"lean": rules.method == "lean", "room": rules.room << 20}


PATCH = LossPatch()
