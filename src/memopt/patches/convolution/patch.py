"""Convolutions inside scopes: their backward frees a recomputed input as early as possible."""

from __future__ import annotations

import contextlib

from memopt.patches.base import Live, Patch


class ConvolutionPatch(Patch):
    """Convolutions. They have no rows: the rows of the producers of their inputs tell whether these are recomputed."""

    name = "convolution"
    after = ("linear",)
    requires = ("linear",)

    def apply(self, live: Live) -> None:
        from memopt.patches.convolution.module import is_convolution, patch_convolution
        from memopt.patches.swap import is_swapped

        for name, module in live.modules.items():
            is_inside = any(f"{name}.".startswith(f"{scope}.") for scope in live.scopes)
            if is_inside and is_convolution(module) and not is_swapped(module) and live.plan.recipe.selects(name):
                with contextlib.suppress(ValueError):
                    patch_convolution(module, live.scopes.get(name))


PATCH = ConvolutionPatch()
