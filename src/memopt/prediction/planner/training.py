"""The planner's verb: from a model id or folder to a choice or a frontier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memopt.generators import generators_kept
from memopt.patches.base import Effect
from memopt.plan.recipe import Recipe
from memopt.prediction.cards import Card, find_card, setup_on
from memopt.prediction.peak import MARGIN
from memopt.prediction.planner.choice import Choice, Frontier
from memopt.prediction.planner.levels import levels_of
from memopt.prediction.planner.plan import Task, choose, frontier_of, recipes_with
from memopt.prediction.setup import Setup
from memopt.prediction.trace import Trace
from memopt.prediction.tracer import Tracer, trace_ahead
from memopt.reporting.subject import Subject, subject
from memopt.reporting.training import ALL_LINEAR, Precision, Train, training_of

#: Whose rates are taken where none is named.
_USUAL_CARD = "A100 80GB"


@generators_kept()
def plan_training(
    model: str | Path,
    budget: str | int | None = None,
    *,
    card: str | None = None,
    recipe: str | Path | Recipe | None = None,
    batch: int | None = None,
    seq: int | None = None,
    precision: Precision = "bf16",
    train: Train = "full",
    lora_rank: int = 8,
    lora_targets: Sequence[str] = (ALL_LINEAR,),
    setup: Setup | None = None,
    allow: Sequence[Effect] = (),
    inputs: Mapping[str, Any] | str | Path | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Choice | Frontier:
    """The fastest plan for training `model` that fits into `budget`; without one, the frontier of memory against time.

    Computed from the config alone. Arguments and errors are those of `memopt.report`, and:

    Args:
        budget: memory of the device, all of it usable: ``24GiB``, ``24GB``, the name of a card, or a number of bytes.
        card: whose rates are taken; by default those of the card that `budget` names.
        recipe: what a plan changes; by default ``exact-unfolded``.
        setup: optimizer, devices and allocator.
        allow: ``approximate``: shipped recipes whose gradients are off by a bounded error may be taken.

    Raises:
        NegativeVerdict: nothing fits; says what the smallest plan takes.
        UsageError: `budget` or `card` is not known.
    """
    training = training_of(batch, precision, train, lora_rank, lora_targets)
    rates = find_card(card or (budget if isinstance(budget, str) else _USUAL_CARD))
    of = subject(
        model, training, seq=seq, recipe=recipe, inputs=inputs, revision=revision, trust_remote_code=trust_remote_code
    )
    task = _task(str(model), of, setup or Setup(), rates)
    return frontier_of(task) if budget is None else choose(task, _size(budget), approximate=recipes_with(*allow))


def plan_subject(name: str, of: Subject, budget: str | int, *, held: int) -> Choice:
    """The fastest plan for a model whose parameters and buffers take `held` bytes, whatever those of its config do."""
    rates = find_card(budget if isinstance(budget, str) else _USUAL_CARD)
    task = _task(name, of, Setup(), rates)
    own = task.predicted(task.levels.recipe, of.training.batch, 1)
    context = own.setup.context + held - sum(each.nbytes for each in own.trace.parameters)
    return choose(replace(task, setup=replace(task.setup, context=context)), _size(budget))


def _task(name: str, of: Subject, setup: Setup, card: Card) -> Task:
    levels = levels_of(of.sites, of.recipe.unfolded())
    extends: bool | None = None

    def traced(rules: Recipe, rows: int) -> Trace:
        nonlocal extends
        tracer = Tracer(of.config, of.sites, rules, of.folded, of.inputs, extends)
        training = replace(of.training, batch=rows)
        trace_ahead(tracer, training)
        found = tracer.at(training)
        # The first is the recipe's own step; the others have its blocks, some at other levels.
        extends = tracer.extends if extends is None else extends
        return found

    setup, splits = setup_on(card, setup), of.inputs is None
    return Task(name, of.training, setup, card, levels, traced, splits=splits, margin=MARGIN)


def _size(budget: str | int) -> int:
    return find_card(budget).memory if isinstance(budget, str) else budget
