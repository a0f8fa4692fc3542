"""Linears that save a sample of the rows of their input for the gradient of their weight, if that frees bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from memopt.patches.base import (
    EXCLUDED,
    LEFT,
    READS,
    Entry,
    InScopes,
    Live,
    Patch,
    PlanView,
    Rows,
    any_matches,
)
from memopt.patches.capabilities import Checks, Reports, Section, Trial
from memopt.patches.sampled_linear.rules import SampledLinearRules
from memopt.walk.sites import LinearSite, is_inside

if TYPE_CHECKING:
    from memopt.patches.checks import Check

#: An input of fewer channels than this part of the hidden state (an adapter's) is saved whole.
_NARROW = 4


class SampledLinearPatch(Patch, Checks, Reports):
    """Sampled linears. The patch adds fields to the rules of linears, and revises plan entries of linears."""

    name = "sampled_linear"
    after = ("norm", "activation", "linear")
    rows = Rows("linear", {"sample": "sampled"})
    rules = SampledLinearRules
    section = "sampling"

    def decisions(self, plan: PlanView) -> Iterator[Entry]:
        """Linears that read one storage are sampled together or not at all."""
        rules = plan.recipe.rules(SampledLinearRules)
        if rules.is_off:
            return
        outputs = {entry.site for entry in plan.rewrites if entry.kind == "linear"}  # linears with recomputed outputs
        reading = {entry.site for entry in plan.refusals if entry.kind == "linear" and entry.action == READS}
        refusals = _refusals(plan, outputs)
        for site in plan.sites.linears:
            if site.parameter in refusals:
                action = READS if site.parameter in reading else LEFT
                yield Entry("linear", site.parameter, action, refusals[site.parameter])
            elif site.parameter not in outputs:
                together = f", one sample with {', '.join(site.input_shared_with)}" if site.input_shared_with else ""
                reason = f"keeps {rules.budget:.0%} of the rows of its input, if nobody else holds it then{together}"
                yield Entry("linear", site.parameter, "sample", reason)

    def notes(self, plan: PlanView) -> Iterator[str]:
        rules, recipe = plan.recipe.rules(SampledLinearRules), plan.recipe.name
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

    def scope(self, plan: PlanView) -> InScopes:
        return InScopes(exchanges=bool(plan.chosen("linear", "sample")))

    def apply(self, live: Live) -> None:
        from memopt.patches.sampled_linear.module import patch_sampled_linear, sampling_of
        from memopt.patches.sampled_linear.visits import Visits

        names = dict.fromkeys(site.module for site in live.plan.chosen("linear", "sample"))
        visits = Visits()
        for name in names:
            sampling = sampling_of(live.plan.recipe.rules(SampledLinearRules))
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
            live.refuse("", f"its sampled linears get neither padding nor sample numbers: {reason}")

    def checks(self, trial: Trial) -> Iterable[Check]:
        if trial.recipe.rules(SampledLinearRules).is_off:
            return ()
        from memopt.patches.sampled_linear.checks import verify_sampling

        return verify_sampling(trial)

    def report(self, trial: Trial, *, trains_all: bool, note: Callable[[str], None]) -> Section | None:
        if trial.recipe.rules(SampledLinearRules).is_off:
            return None
        from memopt.patches.sampled_linear.prediction import not_measured, predicted_errors

        if not trains_all:
            return not_measured(trial.recipe, "an adapter that was not trained yet has almost no gradient")
        note("Measuring the error of sampled gradients on the model's weights ...")
        return predicted_errors(trial)


def _refusals(plan: PlanView, outputs: set[str]) -> dict[str, str]:
    """Weight -> why its linear saves its whole input, without the linears in `outputs`, which always do so."""
    rewritten = {entry.site: entry for entry in plan.rewrites if entry.kind != "linear"}
    refusals: dict[str, str] = {}
    for site in plan.sites.linears:
        if site.parameter not in outputs and (why := _not_sampled(site, plan, rewritten)) is not None:
            refusals[site.parameter] = why
    for site in plan.sites.linears:
        holder = next((weight for weight in site.input_shared_with if weight in refusals or weight in outputs), None)
        if holder is not None and site.parameter not in refusals and site.parameter not in outputs:
            refusals[site.parameter] = f"0 bytes: also held by {holder}"
    return refusals


def _not_sampled(site: LinearSite, plan: PlanView, rewritten: Mapping[str, Entry]) -> str | None:
    """Why a linear saves its whole input, apart from other linears that read it; None if a sample is possible."""
    rules, sites = plan.recipe.rules(SampledLinearRules), plan.sites
    targeted = rules.targets == "auto" or any_matches(site.module, rules.targets)
    if not (targeted and plan.recipe.selects(site.module)):
        return EXCLUDED
    if site.computed:
        return "each forward computes its weight anew, or hides the product"
    if len(site.shape) != 2:
        return "its weight is not one matrix: the rows of its input are not tokens"
    if not any(is_inside(site.module, block) for block in sites.blocks):
        return "outside the repeated blocks, where memopt cannot see what else holds its input"
    if 0 < site.width * _NARROW < sites.hidden_size:
        return f"its input has {site.width} channels: almost nothing to free"
    producer = rewritten.get(site.fed_by or "")
    if producer is not None and producer.action != "code":
        if producer.kind == "norm":
            return f"0 bytes: also held by the norm {producer.site}, or recomputed from tensors that it saves"
        return f"0 bytes: recomputed from tensors that {producer.site} saves anyway"
    block = next((name for name in site.given_to if name in sites.blocks), None)
    if block is not None:
        return f"0 bytes: also held by the caller of {block}, whose input it is"
    others = [each for each in site.saved_by if each.rpartition(" in ")[2] not in rewritten]
    return f"0 bytes: also held by {', '.join(others)}" if others else None


PATCH = SampledLinearPatch()
