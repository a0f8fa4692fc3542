"""Sites x recipe -> an action and a reason for each site. Pure data, no torch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from memopt.patches.base import LEFT, Entry, Patch, matches
from memopt.patches.registry import patches
from memopt.plan.recipe import Recipe
from memopt.walk.sites import Sites, is_inside

__all__ = ["Entry", "Plan", "make_plan"]


@dataclass(frozen=True)
class Plan:
    """What a recipe does to a model: one entry for each site."""

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
        """The reasons, as one phrase, of a plan that rewrites nothing."""
        usual = [patch for patch in patches() if _is_usual(patch)]
        reasons = sorted({entry.reason for entry in self.refusals if entry.kind in {patch.kind for patch in usual}})
        return "; ".join(reasons[:3]) or f"it has no {_one_of(usual)}"

    @property
    def does_nothing(self) -> bool:
        """Whether nothing is rewritten and no block's saved tensors are compressed."""
        return not self.rewrites and not any(any(True for _ in patch.compressed(self)) for patch in patches())

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user of this plan."""
        return (*self._idle_notes(), *self._effects())

    def _effects(self) -> Iterator[str]:
        if "approximate" in self.recipe.effects:
            yield (
                f"Recipe '{self.recipe.name}' is approximate: the forward is exact, the gradient is off by up to "
                f"{self.recipe.gradient_error:.0%} (relative, declared; `memopt verify` measures it on this model). "
                "The exact alternative is `--recipe exact`; `memopt report --recipe exact` shows its bytes."
            )
        for patch in patches():
            yield from patch.notes(self)

    def _idle_notes(self) -> Iterator[str]:
        """A sentence for each pattern of the recipe's ``targets`` and ``ignore`` that names nothing in this model."""
        about = [patch for patch in patches() if patch.kind and patch.key]
        if all(_is_usual(patch) or self.recipe.rules(patch.rules).is_off for patch in about):
            about = [patch for patch in about if _is_usual(patch)]
        known = {name for patch in about for name in patch.targets(self)}
        for key, patterns in (("targets", self.recipe.targets), ("ignore", self.recipe.ignore)):
            for pattern in patterns if known else ():
                if not any(matches(name, pattern) for name in known):
                    yield f"Recipe '{self.recipe.name}': {key} '{pattern}' matches no {_one_of(about)} of this model."

    def chosen(self, kind: str, *actions: str) -> tuple[Any, ...]:
        """Sites of a kind whose action is one of `actions`; without any, all that are rewritten."""
        names = {
            entry.site
            for entry in self.entries
            if entry.kind == kind and (entry.action in actions if actions else entry.rewritten)
        }
        return tuple(
            site
            for patch in patches()
            if patch.kind == kind
            for name, site in (patch.propose(self.sites) if names else ())
            if name in names
        )

    def folds(self) -> tuple[Any, ...]:
        """Sites whose parameters are folded into those of their readers."""
        return tuple(
            site
            for patch in patches()
            if patch.kind and patch.folding
            for site in self.chosen(patch.kind, patch.folding)
        )

    def without_folds(self, reasons: dict[str, str]) -> Plan:
        """The plan with the folds in `reasons` (site -> reason) refused."""
        instead = {patch.kind: patch for patch in patches() if patch.folding}

        def revised(entry: Entry) -> Entry:
            patch = instead.get(entry.kind)
            if patch is None or entry.action != patch.folding or entry.site not in reasons:
                return entry
            return dataclasses.replace(entry, action=patch.unfolded, reason=f"not folded: {reasons[entry.site]}")

        return dataclasses.replace(self, entries=tuple(map(revised, self.entries)))

    def left(self, kind: str, module: str, reason: str) -> Plan:
        """The plan with what it does to `module` as a site of `kind` refused: a weight of it, where sites are weights,
        or the site that it is in."""
        planned = [entry.site for entry in self.rewrites if entry.kind == kind]
        inside = [site for site in planned if is_inside(site, module)]
        sites = {module} if module in planned else {*inside} or {each for each in planned if is_inside(module, each)}

        def revised(entry: Entry) -> Entry:
            if entry.kind != kind or not entry.rewritten or entry.site not in sites:
                return entry
            return dataclasses.replace(entry, action=LEFT, reason=reason)

        return dataclasses.replace(self, entries=tuple(map(revised, self.entries)))

    def changed_outputs(self) -> tuple[str, ...]:
        """Fields of the model's output that the folds of the plan change, as the recipe allows."""
        return tuple(dict.fromkeys(output for patch in patches() for output in patch.changed_outputs(self)))

    def counts(self) -> dict[str, dict[str, int]]:
        """Kind -> action -> number of sites."""
        table: dict[str, Counter[str]] = {}
        for entry in self.entries:
            table.setdefault(entry.kind, Counter())[entry.action] += 1
        return {kind: dict(actions) for kind, actions in table.items()}

    @property
    def done(self) -> str:
        """How many sites of each kind are rewritten, as one phrase: ``61 of 61 norms, 30 of 30 gated MLPs``."""
        known = {patch.kind: patch for patch in patches()}
        counts = ((known[kind], sum(of.values()), of.get(LEFT, 0)) for kind, of in self.counts().items())
        return ", ".join(f"{total - left} of {total} {patch.plural}" for patch, total, left in counts if total > left)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; stored in memopt.json."""
        return {
            "recipe": self.recipe.model_dump(mode="json"),
            "counts": self.counts(),
            "entries": [dataclasses.asdict(entry) for entry in self.entries],
        }


def make_plan(sites: Sites, recipe: Recipe) -> Plan:
    """Decide every site of `sites` under `recipe`."""
    plan = Plan(recipe, sites, ())
    for patch in patches():  # each sees what was decided before it
        plan = dataclasses.replace(plan, entries=(*plan.entries, *patch.decisions(plan)))
    return plan


def _is_usual(patch: Patch) -> bool:
    """Whether the patch has sites and is on by default."""
    return bool(patch.kind and patch.key) and not patch.rules().is_off


def _one_of(patches: Sequence[Patch]) -> str:
    *nouns, last = [patch.noun for patch in patches]
    return f"{', '.join(nouns)} or {last}" if nouns else last
