"""The attention implementation of a model, set by transformers' switch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from memopt.patches.base import LEFT, Live, Patch, PlanView, RecipeView, Rows, Rules
from memopt.patches.capabilities import EngineSettings
from memopt.walk.models.attention import Implementation, missing
from memopt.walk.sites import Sites

SET = "set implementation"


class AttentionRules(Rules):
    """The attention implementation that runs."""

    key = "attention"

    implementation: Literal["keep"] | Implementation = "keep"
    """``keep``: the model's own implementation."""

    @property
    def is_off(self) -> bool:
        return self.implementation == LEFT

    def without_effect(self) -> Iterator[str]:
        if packages := missing(self.implementation):
            why = _needs(self.implementation, packages)
            yield f"{self.key}.implementation has no effect on this machine, because {why}."

    @property
    def runs_attention(self) -> str | None:
        return None if self.is_off else self.implementation


def _needs(implementation: str, packages: Iterable[str]) -> str:
    return f"{implementation} needs the package {' or '.join(packages)}, which is not installed"


class AttentionPatch(Patch, EngineSettings):
    """The attention implementation. Its one site is the whole model, whose parts may have their own implementations."""

    name = "attention"
    rows = Rows(
        "attention",
        {SET: "set"},
        noun="attention implementation",
        plural="attention implementations",
        are_selected=False,
    )
    rules = AttentionRules

    def propose(self, sites: Sites) -> Iterator[tuple[str, None]]:
        yield "", None

    def decide(self, site: None, plan: PlanView) -> tuple[str, str] | None:
        rules = plan.recipe.rules(AttentionRules)
        if rules.is_off:
            return None
        wanted = rules.implementation
        if packages := missing(wanted):
            return LEFT, _needs(wanted, packages)
        return SET, f"{wanted}, where the model supports it"

    def engine_settings(self, recipe: RecipeView, blocks: Sequence[str]) -> Mapping[str, str]:
        rules = recipe.rules(AttentionRules)
        return {} if rules.is_off else {"attn_implementation": rules.implementation}

    def apply(self, live: Live) -> None:
        if any(entry.kind == self.name for entry in live.plan.rewrites):
            from memopt.patches.attention.module import first_pretrained, set_implementation

            rules = live.plan.recipe.rules(AttentionRules)
            live.attempt(self.name, first_pretrained(live.modules), set_implementation, rules.implementation)


PATCH = AttentionPatch()
