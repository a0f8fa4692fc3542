"""Post-norm modules: with Triton, the norm reads both terms of its input, and their sum is not written to memory."""

from __future__ import annotations

from memopt.patches.base import Live, Patch
from memopt.patches.sum_norm.site import SumNormSite


class SumNormPatch(Patch):
    """Modules that compute norm(dense(hidden) + residual) with a patched norm; they have no rows of their own."""

    name = "sum_norm"
    after = ("norm",)

    def apply(self, live: Live) -> None:
        for site in live.plan.sites.of(SumNormSite):
            norm = f"{site.name}.{site.norm}" if site.name else site.norm
            if norm in live.done("norm"):
                from memopt.patches.sum_norm.module import patch_sum_norm

                live.attempt(self.name, site.name, patch_sum_norm, site, live.scopes.get(site.name))


PATCH = SumNormPatch()
