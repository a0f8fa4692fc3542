"""The planner's verb: from a model id or folder to a choice or a frontier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
from memopt.reporting.step import Step
from memopt.reporting.subject import step_of
from memopt.reporting.training import Request

#: Whose rates are taken where none is named.
_USUAL_CARD = "A100 80GB"


@generators_kept()
def plan_training(
    request: Request,
    budget: str | int | None = None,
    *,
    card: str | None = None,
    setup: Setup | None = None,
    allow: Sequence[Effect] = (),
) -> Choice | Frontier:
    """The fastest plan for training a model that fits into `budget`; without one, the frontier of memory against time.

    Computed from the config alone. Errors are those of `memopt.report`, and:

    Args:
        request: the model, how it is trained, and the recipe that a plan changes.
        budget: memory of the device, all of it usable: ``24GiB``, ``24GB``, the name of a card, or a number of bytes.
        card: whose rates are taken; by default those of the card that `budget` names.
        setup: optimizer, devices and allocator.
        allow: ``approximate``: shipped recipes whose gradients are off by a bounded error may be taken.

    Raises:
        NegativeVerdict: nothing fits; says what the smallest plan takes.
        UsageError: `budget` or `card` is not known.
    """
    rates = find_card(card or (budget if isinstance(budget, str) else _USUAL_CARD))
    task = _task(str(request.model), step_of(request), setup or Setup(), rates)
    return frontier_of(task) if budget is None else choose(task, _size(budget), approximate=recipes_with(*allow))


def plan_step(name: str, of: Step, budget: str | int, *, held: int) -> Choice:
    """The fastest plan for a model whose parameters and buffers take `held` bytes, whatever those of its config do."""
    rates = find_card(budget if isinstance(budget, str) else _USUAL_CARD)
    task = _task(name, of, Setup(), rates)
    own = task.predicted(task.levels.recipe, of.training.batch, 1)
    context = own.setup.context + held - sum(each.nbytes for each in own.trace.parameters)
    return choose(replace(task, setup=replace(task.setup, context=context)), _size(budget))


def _task(name: str, of: Step, setup: Setup, card: Card) -> Task:
    levels = levels_of(of.sites, of.rules.unfolded())
    extends: bool | None = None

    def traced(rules: Recipe, rows: int) -> Trace:
        nonlocal extends
        tracer = Tracer(replace(of, recipe=rules), extends)
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
