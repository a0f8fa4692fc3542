"""Sites x recipe -> an action and a reason for each site. Pure data, no torch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from memopt.errors import printable
from memopt.patches.base import LEFT, READS, Entry, Patch, Patterns, PlanView, Rows, Rules
from memopt.patches.registry import patches, rows
from memopt.plan.recipe import Recipe
from memopt.walk.sites import Sites, is_inside

__all__ = ["Entry", "Plan", "coverage_totals", "make_plan"]


@dataclass(frozen=True)
class Plan:
    """The decisions of a recipe about a model: one entry for each site."""

    recipe: Recipe
    sites: Sites
    entries: tuple[Entry, ...]

    def __repr__(self) -> str:  # of `print` too
        return printable("\n  ".join((f"Recipe '{self.recipe.name}':", *coverage_totals(self))), "\n")

    @property
    def rewrites(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.rewritten)

    @property
    def refusals(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if not entry.rewritten)

    @property
    def why_nothing(self) -> str:
        """One phrase with the reasons why the plan rewrites nothing."""
        usual = [its for its, rules in _ruled() if not rules().is_off]
        reasons = sorted({entry.reason for entry in self.refusals if entry.kind in {its.kind for its in usual}})
        return "; ".join(reasons[:3]) or f"it has no {_one_of(usual)}"

    @property
    def does_nothing(self) -> bool:
        """Whether nothing is rewritten and no block's saved tensors are compressed."""
        return not self.rewrites and not any(patch.scope(self).compressed for patch in patches())

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user of this plan."""
        return (*self.idle, *self._effects())

    def _effects(self) -> Iterator[str]:
        if "approximate" in self.recipe.effects:
            declared = f"up to {self.recipe.gradient_error:.0%} (relative, declared"
            if not self.recipe.gradient_error:
                declared = "a part that gradient_error, which is 0, does not declare (relative"
            yield (
                f"Recipe '{self.recipe.name}' is approximate: the forward is exact, the gradient is off by "
                f"{declared}; `memopt verify` measures it on this model). "
                "The exact alternative is `--recipe exact`, in Python memopt.patch(model); "
                "`memopt report --recipe exact` shows its bytes."
            )
        for patch in patches():
            yield from patch.notes(self)

    @property
    def idle(self) -> tuple[str, ...]:
        """A sentence for each pattern of the recipe that matches nothing in this model, and for each field that has no
        effect beside another."""
        names = {name for patch in patches() for name in _selected(patch, self.sites)}
        noun = "norm, linear or other place"
        settings = [Patterns(key, getattr(self.recipe, key), names, noun) for key in ("targets", "ignore")]
        settings += self.recipe.patterns(self.sites)
        return (
            *(
                f"Recipe '{self.recipe.name}': {each.setting} '{pattern}' matches no {each.noun} of this model."
                for each in settings
                for pattern in each.idle()
            ),
            *(f"Recipe '{self.recipe.name}': {sentence}" for sentence in self.recipe.without_effect()),
        )

    def chosen(self, kind: str, *actions: str) -> tuple[Any, ...]:
        """Sites of a kind whose action is one of `actions`; without `actions`, all rewritten sites of the kind."""
        names = {
            entry.site
            for entry in self.entries
            if entry.kind == kind and (entry.action in actions if actions else entry.rewritten)
        }
        return tuple(
            site
            for patch in patches()
            if patch.rows is not None and patch.rows.kind == kind
            for name, site in (patch.propose(self.sites) if names else ())
            if name in names
        )

    def folds(self) -> tuple[Any, ...]:
        """Sites whose parameters are folded into the parameters of their readers."""
        return tuple(site for kind, its in rows().items() if its.fold for site in self.chosen(kind, its.fold))

    def without_folds(self, reasons: dict[str, str]) -> Plan:
        """The plan with the folds in `reasons` (site -> reason) refused."""
        known = rows()

        def revised(entry: Entry) -> Entry:
            its = known[entry.kind]
            if entry.action != its.fold or entry.site not in reasons:
                return entry
            return dataclasses.replace(entry, action=its.unfolded, reason=f"not folded: {reasons[entry.site]}")

        return dataclasses.replace(self, entries=tuple(map(revised, self.entries)))

    def left(self, kind: str, module: str, reason: str) -> Plan:
        """The plan with rewrites of `kind` at `module` refused: at the site `module`, else at sites inside it (its
        weights), else at sites around it."""
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
        folded = self.folds() if self.recipe.changes_outputs else ()
        return tuple(dict.fromkeys(output for site in folded for output in site.changed_outputs))

    def counts(self) -> dict[str, dict[str, int]]:
        """Kind -> action -> number of sites."""
        table: dict[str, Counter[str]] = {}
        for entry in self.entries:
            table.setdefault(entry.kind, Counter())[entry.action] += 1
        return {kind: dict(actions) for kind, actions in table.items()}

    @property
    def done(self) -> str:
        """How many sites of each kind are rewritten, as one phrase: ``61 of 61 norms, 30 of 30 gated MLPs``."""
        known = rows()
        done = Counter(entry.kind for entry in self.rewrites)
        totals = ((kind, sum(actions.values())) for kind, actions in self.counts().items() if done[kind])
        return ", ".join(f"{done[kind]} of {total} {known[kind].plural}" for kind, total in totals)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; stored in memopt.json."""
        return {
            "recipe": self.recipe.model_dump(mode="json"),
            "counts": self.counts(),
            "entries": [dataclasses.asdict(entry) for entry in self.entries],
        }


def coverage_totals(plan: PlanView) -> list[str]:
    """One line for each kind of site: the number of each action; they add up to all sites."""
    known, lines = rows(), []
    for kind, counts in plan.counts().items():
        its, total = known[kind], sum(counts.values())
        done = {**its.actions, READS: "reading a recomputed input", LEFT: "left"}
        parts = [f"{counts[action]} {participle}" for action, participle in done.items() if counts.get(action)]
        lines.append(f"{total} {its.noun if total == 1 else its.plural}: {', '.join(parts)}")
    return lines


def make_plan(sites: Sites, recipe: Recipe) -> Plan:
    """Decide every site of `sites` under `recipe`."""
    plan = Plan(recipe, sites, ())
    for patch in patches():  # each patch sees the decisions before it, and may revise them
        entries = {(entry.kind, entry.site): entry for entry in plan.entries}
        entries |= {(entry.kind, entry.site): entry for entry in patch.decisions(plan)}
        plan = dataclasses.replace(plan, entries=tuple(entries.values()))
    return plan


def _ruled() -> list[tuple[Rows, type[Rules]]]:
    """(rows, rules) of each kind of site that has a key in recipes."""
    ruled = ((patch.rows, patch.rules) for patch in patches())
    return [(its, rules) for its, rules in ruled if its is not None and its.noun and rules is not None]


def _selected(patch: Patch, sites: Sites) -> Iterator[str]:
    """Names of modules that ``targets`` and ``ignore`` can select."""
    for name, site in patch.propose(sites) if patch.rows is not None and patch.rows.are_selected else ():
        yield getattr(site, "module", name)


def _one_of(kinds: Sequence[Rows]) -> str:
    *nouns, last = [its.noun for its in kinds]
    return f"{', '.join(nouns)} or {last}" if nouns else last
