"""Linears that recompute their input: the output of a norm, or of the activation before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from memopt.patches.activation.patch import gains_alone
from memopt.patches.base import Live, Patch

if TYPE_CHECKING:
    from torch import nn


class LinearPatch(Patch):
    """A known activation and the linear behind it, which recomputes and differentiates it in one pass where Triton
    runs; and inside scopes every plain linear, adapters' included, which reads the recompute spec of its input.

    They have no rows of their own: the activation's row says that its output is recomputed.
    """

    name = "linear"
    after = ("activation", "sampled_linear")
    requires = ("activation",)

    def apply(self, live: Live) -> None:
        from memopt.activations import ACTIVATIONS
        from memopt.patches.activation.module import patch_activation
        from memopt.patches.linear.module import patch_linear, trains_as_linear

        modules = {linear.parameter: linear.module for linear in live.plan.sites.linears}
        for site in live.plan.chosen("activation", "recompute"):
            linear = modules.get(site.next_linear or "", "")
            known = site.is_module and site.replays and site.kind in ACTIVATIONS and site.gated_mlp is None
            if not known or linear not in live.modules or not trains_as_linear(live.modules[linear]):
                continue
            if not gains_alone(site):
                live.attempt("activation", site.name, patch_activation, site)
            live.attempt(self.name, linear, patch_linear)

    def prepares(self) -> Callable[[nn.Module], None]:
        from memopt.patches.linear.module import adopt_linears

        return adopt_linears


PATCH = LinearPatch()
