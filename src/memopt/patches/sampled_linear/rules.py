"""The rules of a recipe for sampled linears."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from memopt.patches.base import OFF, Effect, Patterns, one_or_more
from memopt.patches.linear.decide import LinearRules
from memopt.walk.sites import Sites


class SampledLinearRules(LinearRules):
    """How gradients of linears' weights are computed, and which outputs of linears are recomputed."""

    method: Literal["none", "wta-crs", "systematic", "crs", "uniform"] = "none"
    """Estimate them from a sample of the input's rows, drawn by this method: unbiased, with noise. ``none``: exact."""
    budget: float = Field(default=0.3, gt=0.0, lt=1.0)
    """Part of the rows that is kept."""
    targets: Annotated[Literal["auto"] | tuple[str, ...], one_or_more("auto")] = "auto"
    """Names of linears (shell wildcards) to sample; ``auto``: all. Linears whose sample frees nothing stay exact."""

    @property
    def is_off(self) -> bool:
        return self.method == OFF

    def without_method(self) -> tuple[str, ...]:
        return tuple(name for name in super().without_method() if name not in LinearRules.model_fields)

    def patterns(self, sites: Sites) -> Iterator[Patterns]:
        yield from super().patterns(sites)
        yield Patterns(f"{self.key}.targets", self.targets, {site.module for site in sites.linears}, "linear")

    @property
    def effect(self) -> Effect:
        return "exact" if self.is_off else "sampled"
