"""Linears that keep a sample of the rows of their input for the gradient of their weight, where that frees bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from memopt.patches.base import (
    EXCLUDED,
    LEFT,
    OFF,
    Entry,
    Live,
    Patch,
    PlanView,
    Section,
    Trial,
    any_matches,
    matches,
)
from memopt.patches.linear.decide import RECOMPUTE, decide_output, output_levels
from memopt.patches.sampled_linear.rules import LinearRules
from memopt.walk.sites import LinearSite, Sites

if TYPE_CHECKING:
    from memopt.checks import Check

#: An input of fewer channels than this part of the hidden state (an adapter's) is kept whole.
_NARROW = 4


class SampledLinearPatch(Patch):
    """Sampled linears; every linear of the model has a row."""

    name = "sampled_linear"
    kind = noun = "linear"
    plural = "linears"
    after = ("norm", "gated_mlp", "activation")
    requires = ("linear",)
    actions: ClassVar[Mapping[str, str]] = {"sample": "sampled", RECOMPUTE: "output recomputed"}
    key, rules = "linears", LinearRules
    section = "sampling"

    def propose(self, sites: Sites) -> Iterator[tuple[str, LinearSite]]:
        return ((site.parameter, site) for site in sites.linears)

    def levels(self, plan: PlanView) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        found: dict[str, dict[str, tuple[str, ...]]] = {}
        for block, names in output_levels(plan).items():
            first, second, *more = (*(name.rpartition(".")[2] for name in names), "", "")
            for words, count in (
                (first, 1),
                (second and f"{first} and {second}", 2),
                (any(more) and "all linears", None),
            ):
                if words:
                    found.setdefault(f"{words} recomputed", {})[block] = tuple(names[:count])
        return found

    def at_levels(self, chosen: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        names = [name for its in chosen.values() for name in its]
        return (f"{self.key}.recompute={'[' + ','.join(names) + ']' if names else OFF}",)

    def decisions(self, plan: PlanView) -> Iterator[Entry]:
        """Linears that read one storage are sampled together or not at all."""
        rules = plan.recipe.rules(LinearRules)
        outputs = {site.parameter: decide_output(site, plan) for site in plan.sites.linears}
        recomputed = {name: row[1] for name, row in outputs.items() if row is not None and row[0] == RECOMPUTE}
        refusals = {} if rules.is_off else _refusals(plan, recomputed)
        for site in plan.sites.linears:
            shared, output = ", ".join(site.input_shared_with), outputs[site.parameter]
            if output is not None and (rules.is_off or output[0] == RECOMPUTE):
                yield Entry("linear", site.parameter, *output)
            elif rules.is_off:
                fed = f"; its input comes from {site.fed_by}" if site.fed_by else ""
                fed = f"; its input is one storage with {shared}" if shared else fed
                yield Entry("linear", site.parameter, LEFT, f"exact as it is{fed}")
            elif site.parameter in refusals:
                yield Entry("linear", site.parameter, LEFT, refusals[site.parameter])
            else:
                reason = f"keeps {rules.budget:.0%} of the rows of its input, if nobody else holds it then"
                together = f", one sample with {shared}" if shared else ""
                yield Entry("linear", site.parameter, "sample", reason + together)

    def targets(self, plan: PlanView) -> Collection[str]:
        return {site.module for site in plan.sites.linears}

    def notes(self, plan: PlanView) -> Iterator[str]:
        rules, recipe = plan.recipe.rules(LinearRules), plan.recipe.name
        modules = self.targets(plan)
        outputs = {*modules, *(site.output_module for site in plan.sites.linears)}
        for field, patterns, known in (("targets", rules.targets, modules), ("recompute", rules.recompute, outputs)):
            for pattern in () if isinstance(patterns, str) or not modules else patterns:
                if not any(matches(name, pattern) for name in known):
                    yield f"Recipe '{recipe}': {self.key}.{field} '{pattern}' matches no {self.noun} of this model."
        if rules.is_off:
            return
        if not plan.chosen("linear", "sample"):
            yield (
                f"Recipe '{recipe}' samples no linear of this model, so no gradient is estimated: each input is also "
                "held by somebody else, or can be recomputed, as the coverage table says."
            )
        else:
            yield (
                f"Recipe '{recipe}' estimates the gradients of sampled linears' weights from {rules.budget:.0%} of "
                "the rows: right on average, with noise that `memopt report` predicts where the weights are there. The "
                f"exact alternative keeps as few rows: micro-batches of {rules.budget:.0%} of the batch, with gradient "
                "accumulation."
            )

    def settles(self, plan: PlanView) -> bool:
        return bool(plan.chosen("linear", "sample"))

    def apply(self, live: Live) -> None:
        from memopt.patches.sampled_linear.module import patch_sampled_linear, sampling_of
        from memopt.patches.sampled_linear.visits import Visits

        names = dict.fromkeys(site.module for site in live.plan.chosen("linear", "sample"))
        visits = Visits()
        for name in names:
            sampling = sampling_of(live.plan.recipe.rules(LinearRules))
            live.attempt(self.name, name, patch_sampled_linear, sampling, visits, name)

    def finish(self, live: Live) -> None:
        if not live.done(self.name):
            return
        from memopt.patches.sampled_linear.module import samplings_in
        from memopt.patches.sampled_linear.visits import patch_visits

        visits = next(iter(samplings_in(live.model).values())).visits
        linears = [live.modules[name] for name in live.done(self.name)]
        try:
            patch_visits(live.model, visits, linears)
        except ValueError as reason:
            live.refuse("", f"its sampled linears are told of neither padding nor samples: {reason}")

    def checks(self, trial: Trial) -> Iterable[Check]:
        if trial.recipe.rules(LinearRules).is_off:
            return ()
        from memopt.patches.sampled_linear.checks import verify_sampling

        return verify_sampling(trial)

    def report(self, trial: Trial, *, trains_all: bool, note: Callable[[str], None]) -> Section | None:
        if trial.recipe.rules(LinearRules).is_off:
            return None
        from memopt.patches.sampled_linear.prediction import not_measured, predicted_errors

        if not trains_all:
            return not_measured(trial.recipe, "an adapter that was not trained yet has no gradient to speak of")
        note("Measuring the error of sampled gradients on the model's weights ...")
        return predicted_errors(trial)


def _refusals(plan: PlanView, recomputed: Mapping[str, str]) -> dict[str, str]:
    """Weight -> why its linear keeps its whole input, for those that do: those whose output is `recomputed` too."""
    rewritten = {entry.site: entry for entry in plan.rewrites}
    linears = plan.sites.linears
    refusals = {site.parameter: why for site in linears if (why := _not_sampled(site, plan, rewritten)) is not None}
    refusals |= recomputed
    for site in linears:
        holder = next((weight for weight in site.input_shared_with if weight in refusals), None)
        if site.parameter not in refusals and holder is not None:
            refusals[site.parameter] = f"0 bytes: also held by {holder}"
    return refusals


def _not_sampled(site: LinearSite, plan: PlanView, rewritten: Mapping[str, Entry]) -> str | None:
    """Why a linear keeps its whole input, whoever else reads it; None where nothing is against a sample."""
    rules, sites = plan.recipe.rules(LinearRules), plan.sites
    targeted = rules.targets == "auto" or any_matches(site.module, rules.targets)
    if not (targeted and plan.recipe.selects(site.module)):
        return EXCLUDED
    if len(site.shape) != 2:
        return "its weight is not one matrix: the rows of its input are not tokens"
    if not any(site.module == block or site.module.startswith(f"{block}.") for block in sites.blocks):
        return "outside of the repeated blocks, where nothing tells who else holds its input"
    if 0 < site.width * _NARROW < sites.hidden_size:
        return f"its input has {site.width} channels only: next to nothing to free"
    producer = rewritten.get(site.fed_by or "")
    if producer is not None and producer.action != "code":
        if producer.kind == "norm":
            return f"0 bytes: also held by the norm {producer.site}, or recomputed from what that keeps"
        return f"0 bytes: recomputed from what {producer.site} keeps anyway"
    block = next((name for name in site.given_to if name in sites.blocks), None)
    if block is not None:
        return f"0 bytes: also held by the caller of {block}, whose input it is"
    others = [each for each in site.saved_by if each.rpartition(" in ")[2] not in rewritten]
    return f"0 bytes: also held by {', '.join(others)}" if others else None


PATCH = SampledLinearPatch()
