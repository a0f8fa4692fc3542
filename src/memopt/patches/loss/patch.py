"""The loss over the vocabulary: shown, not rewritten."""

from __future__ import annotations

from collections.abc import Iterator

from memopt.patches.base import LEFT, Patch, PlanView
from memopt.walk.sites import LossHead, Sites


class LossPatch(Patch):
    """The row of the loss head."""

    name = kind = noun = plural = "loss"
    after = ("dropout",)

    def propose(self, sites: Sites) -> Iterator[tuple[str, LossHead]]:
        if sites.loss_head is not None:
            yield sites.loss_head.parameter, sites.loss_head

    def decide(self, site: LossHead, plan: PlanView) -> tuple[str, str]:
        return LEFT, "stock loss over all logits; not rewritten by this recipe"


PATCH = LossPatch()
