"""Sites x recipe -> what is rewritten, how, and what is left, with a reason for each. Pure data, no torch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memopt.plan.decide import REWRITABLE, Action, Entry, decide
from memopt.plan.recipe import Recipe, matches
from memopt.walk.sites import ActivationSite, DropoutSite, GatedMLPSite, LinearSite, NormSite, Sites

__all__ = ["Action", "Entry", "Plan", "make_plan"]


@dataclass(frozen=True)
class Plan:
    """What a recipe does to a model."""

    recipe: Recipe
    sites: Sites
    entries: tuple[Entry, ...]

    @property
    def rewrites(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.rewritten)

    @property
    def refusals(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if not entry.rewritten)

    @property
    def why_nothing(self) -> str:
        """Why nothing is rewritten, where that is so: a few reasons, as one phrase."""
        reasons = sorted({e.reason for e in self.refusals if e.kind in REWRITABLE})
        return "; ".join(reasons[:3]) or "it has no norm, activation or gated MLP"

    @property
    def does_nothing(self) -> bool:
        """Whether the model keeps what it kept: nothing is rewritten, and no block's tensors are compressed."""
        return not self.rewrites and (self.recipe.kept.method == "exact" or not self.sites.blocks)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user of this plan should know."""
        return (*self.idle_notes, *self._price())

    def _price(self) -> Iterator[str]:
        if self.recipe.approximates:
            yield (
                f"Recipe '{self.recipe.name}' is approximate: the forward is exact, the gradient is off by up to "
                f"{self.recipe.gradient_error:.0%} (relative, declared; `memopt verify` measures it on this model). "
                "The exact alternative is `--recipe exact`; `memopt report --recipe exact` shows what it keeps."
            )
        if self.recipe.samples and not self.sampled_linears():
            yield (
                f"Recipe '{self.recipe.name}' samples no linear of this model, so no gradient is estimated: each input "
                "is also held by somebody else, or can be made again, as the coverage table says."
            )
        elif self.recipe.samples:
            budget = self.recipe.linears.budget
            yield (
                f"Recipe '{self.recipe.name}' estimates the gradients of sampled linears' weights from {budget:.0%} of "
                "the rows: right on average, with noise that `memopt report` predicts where the weights are there. The "
                f"exact alternative keeps as few rows: micro-batches of {budget:.0%} of the batch, with gradient "
                "accumulation."
            )

    @property
    def idle_notes(self) -> tuple[str, ...]:
        """A sentence for each pattern of the recipe's ``targets`` and ``ignore`` that names nothing in this model."""
        recipe, linears = self.recipe, {site.module for site in self.sites.linears}
        names = {entry.site for entry in self.entries if entry.kind in REWRITABLE}
        what = "norm, activation or gated MLP"
        if recipe.samples or recipe.dropouts.method != "none":
            names |= linears | {site.name for site in self.sites.dropouts}
            what = "norm, activation, gated MLP, linear or dropout"
        sampled = recipe.linears.targets if recipe.linears.targets != "auto" else ()
        patterns = (
            *(("targets", each, names, what) for each in recipe.targets),
            *(("ignore", each, names, what) for each in recipe.ignore),
            *(("linears.targets", each, linears, "linear") for each in sampled),
        )
        return tuple(
            f"Recipe '{recipe.name}': {key} '{pattern}' matches no {kinds} of this model."
            for key, pattern, known, kinds in patterns
            if known and not any(matches(name, pattern) for name in known)
        )

    def norms(self, *actions: Action) -> tuple[NormSite, ...]:
        """Norm sites whose action is one of `actions`."""
        chosen = {e.site for e in self.entries if e.kind == "norm" and e.action in actions}
        return tuple(norm for norm in self.sites.norms if norm.name in chosen)

    def changed_outputs(self) -> tuple[str, ...]:
        """Fields of the model's output that the folds of the plan change, as the recipe allows."""
        return tuple(dict.fromkeys(output for norm in self.norms("fold") for output in norm.changed_outputs))

    def gated_mlps(self) -> tuple[GatedMLPSite, ...]:
        """Gated MLP sites of which no more than gate and up are kept."""
        if self.recipe.activations.method == "none":  # act(gate) is to be kept
            return ()
        chosen = {e.site for e in self.entries if e.kind == "gated_mlp" and e.rewritten}
        return tuple(site for site in self.sites.gated_mlps if site.name in chosen)

    def activations(self, *actions: Action) -> tuple[ActivationSite, ...]:
        """Activation sites whose action is one of `actions`; by default those that are rewritten."""
        wanted = actions or ("recompute", "code")
        chosen = {e.site for e in self.entries if e.kind == "activation" and e.action in wanted}
        return tuple(site for site in self.sites.activations if site.name in chosen)

    def sampled_linears(self) -> tuple[LinearSite, ...]:
        """Linear sites that keep a sample of the rows of their input."""
        chosen = {e.site for e in self.entries if e.kind == "linear" and e.action == "sample"}
        return tuple(site for site in self.sites.linears if site.parameter in chosen)

    def seeded_dropouts(self) -> tuple[DropoutSite, ...]:
        """Dropout sites that keep a seed instead of their mask."""
        chosen = {e.site for e in self.entries if e.kind == "dropout" and e.action == "seed"}
        return tuple(site for site in self.sites.dropouts if site.name in chosen)

    def counts(self) -> dict[str, dict[str, int]]:
        """Kind -> action -> number of sites."""
        table: dict[str, Counter[str]] = {}
        for entry in self.entries:
            table.setdefault(entry.kind, Counter())[entry.action] += 1
        return {kind: dict(actions) for kind, actions in table.items()}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; stored in memopt.json."""
        return {
            "recipe": self.recipe.model_dump(mode="json"),
            "counts": self.counts(),
            "entries": [dataclasses.asdict(entry) for entry in self.entries],
        }


def make_plan(sites: Sites, recipe: Recipe) -> Plan:
    """Decide every site of `sites` under `recipe`."""
    return Plan(recipe=recipe, sites=sites, entries=decide(sites, recipe))
