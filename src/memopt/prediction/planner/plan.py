"""Choose a plan for a model and a budget: trace, measure the levels, search, and check the plan by a trace."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from memopt.environment.forks import each, processes
from memopt.errors import NegativeVerdict
from memopt.patches.base import Effect
from memopt.plan.recipe import Recipe, load_recipe
from memopt.plan.shipped import shipped
from memopt.prediction.cards import Card
from memopt.prediction.peak import Prediction, combine
from memopt.prediction.planner.choice import Choice, Frontier, Plan, apart, budget_name, in_words
from memopt.prediction.planner.levels import Levels
from memopt.prediction.planner.measure import Measured, cut, measure
from memopt.prediction.planner.search import (
    BlockModel,
    between,
    cheapest,
    fastest_that_fits,
    frontier,
    smallest,
    without,
)
from memopt.prediction.setup import Setup
from memopt.trace.events import Trace
from memopt.trace.training import Training

TraceOf = Callable[[Recipe, int], Trace]
"""A recipe and the rows of a batch -> the trace of one step."""
#: Number of plans to show beside the chosen one.
_OTHERS = 2
#: If a plan takes more extra time than this share, settings with less memory in a running block are tried as well.
_SLOW = 0.05
#: They are tried only if one running block at its smallest level needs more than this share of the smallest plan.
_AT_ONCE = 0.2
#: Parts of a peak that do not depend on the batch.
_FIXED = ("weights", "gradients", "optimizer states", "optimizer transients")


@dataclass(frozen=True)
class Task:
    """The input of the planner."""

    model: str
    training: Training
    setup: Setup
    card: Card
    levels: Levels
    trace: TraceOf
    splits: bool = True
    """Whether the batch can be split; False if the user gave it."""
    keeps_batch: bool = False
    """Whether the batch is split only if nothing else fits, since somebody else runs the step."""
    margin: float = 0.0
    """Share of the reserved bytes that has to stay free for a plan to fit."""
    _traces: dict[tuple[str, int], Trace] = field(default_factory=dict, repr=False)

    def limit(self, budget: int) -> int:
        """The largest total of a step that fits with its margin."""
        context = self.setup.context if self.training.cuda_kernels else 0
        return min(budget, context + int((budget - context) / (1 + self.margin)))

    def trace_ahead(self, recipes: Sequence[Recipe], rows: int) -> None:
        """Trace steps that :meth:`predicted` will need, in parallel processes where forks are allowed."""
        new = {key: recipe for recipe in recipes if (key := _key(recipe, rows)) not in self._traces}
        if processes() > 1:
            found = each([partial(self.trace, recipe, rows) for recipe in new.values()])
            self._traces.update(zip(new, found, strict=True))

    def predicted(self, recipe: Recipe, rows: int, accumulation: int) -> Prediction:
        """The prediction for micro-batches of `rows` rows; traced once for each recipe and number of rows."""
        key = _key(recipe, rows)
        if key not in self._traces:
            self._traces[key] = self.trace(recipe, rows)
        return combine(self._traces[key], replace(self.setup, accumulation=accumulation))

    def measured(self, rows: int, accumulation: int) -> Measured:
        """The cost of the levels in micro-batches of `rows` rows."""
        recipe_at = self.levels.recipe_at
        return measure(
            self.levels,
            lambda chosen: cut(self.predicted(recipe_at(chosen), rows, accumulation)),
            lambda together: self.trace_ahead(list(map(recipe_at, together)), rows),
        )


def _key(recipe: Recipe, rows: int) -> tuple[str, int]:
    return recipe.model_dump_json(exclude={"name", "description"}), rows


@dataclass(frozen=True)
class _Route:
    """A way to split the batch, with its block model."""

    task: Task
    measured: Measured
    model: BlockModel
    """The block model, whose times are sums over all micro-batches."""
    rows: int
    accumulation: int
    fastest: int
    """Nanoseconds of the fastest exact plan of the whole batch."""

    def total(self, options: tuple[int, ...]) -> int:
        recipe = self.task.levels.recipe_at(self.measured.levels(options))
        return self.task.predicted(recipe, self.rows, self.accumulation).total

    def plan(self, options: tuple[int, ...], name: str, error: int | None = None) -> Plan:
        """The plan with these options; its total is traced, or is the block model's peak plus `error` bytes."""
        levels = self.measured.levels(options)
        time = self.model.time(options)
        return Plan(
            self.task.levels.recipe_at(levels, name),
            self.task.levels.words(levels),
            self.rows,
            self.accumulation,
            self.total(options) if error is None else self.model.peak(options) + error,
            time / 1e9,
            time / self.fastest - 1,
            traced=error is None,
        )


def choose(task: Task, budget: int, *, approximate: Sequence[Recipe] = ()) -> Choice:
    """The fastest plan whose step, with its margin, takes at most `budget` bytes of the device, and further plans.
    Levels of the blocks and of the loss are tried first. If none of their combinations fits, or the fastest is slow,
    the batch is split into micro-batches whose gradients are summed. Recipes in `approximate` may be chosen as well; in
    them every block is as the recipe says. Raises a NegativeVerdict if nothing fits; its message gives the bytes of the
    smallest plan."""
    name = budget_name(budget)
    whole, limit = _whole(task), task.limit(budget)
    plans = []
    found, route = fastest_that_fits(whole.model, limit, whole.total), whole
    routes = [whole]
    if found is None or whole.plan(found, name).extra > _SLOW:
        routes += _narrowed(whole)
    for narrow in routes[1:]:
        other = fastest_that_fits(narrow.model, limit, narrow.total)
        if other is not None and (found is None or narrow.model.time(other) < whole.model.time(found)):
            found, route = other, narrow
    extra = math.inf if found is None else route.plan(found, name).extra
    tried = found is None or (extra > _SLOW and not task.keeps_batch)
    for split in (split for base in routes for split in _splits(base, limit)) if tried else ():
        if (other := fastest_that_fits(split.model, limit, split.total)) is not None:
            found, route = (other, split) if split.plan(other, name).extra < extra else (found, route)
            break
    if found is not None:
        plans = [route.plan(found, name), *_next(route, found, limit, name)]
    plans += [each for each in _approximate(task, approximate, whole) if each.total <= limit]
    if not plans:
        raise _too_small(task, whole, budget, approximate=bool(approximate))
    best, *others = sorted(plans, key=lambda each: (not each.traced, each.seconds))
    # A plan that is faster by the block model, but was not chosen, did not fit when it was traced.
    others = [each for each in others if each.seconds >= best.seconds and each.words != best.words]
    distinct = {each.words: each for each in sorted(others, key=lambda each: each.seconds)}
    predicted = task.predicted(best.recipe, best.batch, best.accumulation)
    return Choice(
        task.model,
        f"{task.training}, {task.setup}",
        task.card.rates,
        budget,
        best,
        tuple(distinct.values())[:_OTHERS],
        predicted.assumptions if best.exact else (),
        task.training,
        task.setup,
        task.levels.blocks,
        budget - limit,
        predicted.limit_advice,
    )


def frontier_of(task: Task) -> Frontier:
    """Plans for the whole batch, from the fastest to the smallest, by the block model."""
    whole = _whole(task)
    found: list[Plan] = []
    for route in (whole, *_narrowed(whole)):
        combinations = list(frontier(route.model))
        # Reserved bytes beyond the live bytes grow with the live bytes; the largest and smallest step are traced.
        ends = (_own(route.model), combinations[-1])
        (most, beside), (least, besides) = ((p := route.model.peak(each), route.total(each) - p) for each in ends)
        for chosen in combinations:
            share = (route.model.peak(chosen) - least) / max(most - least, 1)
            found.append(route.plan(chosen, "frontier", round(besides + share * (beside - besides))))
    best: list[Plan] = []
    for plan in sorted(found, key=lambda each: (each.total, each.extra)):
        if not best or plan.extra < best[-1].extra:
            best.append(plan)
    return Frontier(task.model, f"{task.training}, {task.setup}", task.card.rates, tuple(reversed(best)))


def recipes_with(*effects: Effect) -> tuple[Recipe, ...]:
    """The shipped recipes that have effects on gradients, and only effects in `effects`; without folds."""
    loaded = (load_recipe(name).unfolded() for name in shipped())
    return tuple(recipe for recipe in loaded if recipe.effects and recipe.effects <= set(effects))


def _own(model: BlockModel) -> tuple[int, ...]:
    """Every block at level 0; this combination is traced in any case."""
    return (0,) * len(model.blocks)


def _whole(task: Task) -> _Route:
    rows, accumulation = task.training.batch, task.setup.accumulation
    measured = task.measured(rows, accumulation)
    model = _times(measured.model(task.card), accumulation)
    return _Route(task, measured, model, rows, accumulation, max(model.time(model.fastest), 1))


def _narrowed(whole: _Route) -> Iterator[_Route]:
    """The whole batch with `Levels.narrower`; nothing if a running block is only a small part of the smallest plan."""
    least = smallest(whole.model)
    if whole.task.levels.narrower and least > whole.model.floor and whole.measured.at_once > _AT_ONCE * least:
        narrow = _whole(replace(whole.task, levels=replace(whole.task.levels, narrows=True)))
        yield replace(narrow, fastest=whole.fastest)


def _splits(whole: _Route, budget: int) -> Iterator[_Route]:
    """Even splits of the batch, the fastest first (by the block models)."""
    task, rows = whole.task, whole.rows
    if rows == 1 or not task.splits or task.setup.release_gradients:
        return
    many, one = task.measured(rows, 2).model(task.card), task.measured(1, 2)
    error = whole.total(_own(many)) - whole.model.peak(_own(many))
    routes = []
    for parts in (parts for parts in range(2, rows + 1) if rows % parts == 0):
        accumulation = parts * whole.accumulation
        of_one = between(one.model(task.card), many, (rows // parts - 1) / (rows - 1))
        route = _Route(task, one, _times(of_one, accumulation), rows // parts, accumulation, whole.fastest)
        found = cheapest(route.model, budget - error)
        routes.append((sys.maxsize if found is None else route.model.time(found), -parts, route))
    yield from (route for _, _, route in sorted(routes, key=lambda each: each[:2]))


def _times(model: BlockModel, steps: int) -> BlockModel:
    """`model` with the times of `steps` micro-batches."""
    blocks = tuple(tuple(replace(each, time=steps * each.time) for each in its) for its in model.blocks)
    return replace(model, blocks=blocks, rest=steps * model.rest)


def _next(route: _Route, chosen: tuple[int, ...], budget: int, name: str) -> Iterator[Plan]:
    """Plans that do without one level of the chosen plan, and then plans with less memory."""
    model, levels = route.model, route.measured.levels(chosen)
    error = route.total(chosen) - model.peak(chosen)
    for is_head, level in sorted({(place == len(levels) - 1, its) for place, its in enumerate(levels)}):
        allowed = [
            [number != level or (place == len(levels) - 1) != is_head for number in (0, *its)]
            for place, its in enumerate(route.measured.examples)
        ]
        if all(map(any, allowed)) and level:
            other = cheapest(without(model, allowed), budget - error)
            if other is not None:
                yield route.plan(other, name, error)
    for part in (0.85, 0.7, 0.55):
        other = cheapest(model, round(part * (model.peak(chosen) + error)) - error)
        if other is not None:
            yield route.plan(other, name, error)


def _approximate(task: Task, recipes: Sequence[Recipe], whole: _Route) -> Iterator[Plan]:
    for recipe in recipes:
        found = task.predicted(recipe, whole.rows, whole.accumulation)
        time = whole.accumulation * task.card.nanoseconds(found.trace.operations)
        words = f"recipe '{recipe.name}'"
        extra = time / whole.fastest - 1
        yield Plan(recipe, words, whole.rows, whole.accumulation, found.total, time / 1e9, extra)


def _too_small(task: Task, whole: _Route, budget: int, *, approximate: bool) -> NegativeVerdict:
    totals = {
        key: combine(traced, replace(task.setup, accumulation=whole.rows // key[1] * whole.accumulation))
        for key, traced in task._traces.items()
    }
    (_, rows), least = min(totals.items(), key=lambda item: item[1].total)
    need = least.total + math.ceil(task.margin * least.reserved)
    parts = least.peak.parts
    fixed = sum(size for part, size in parts.items() if part in _FIXED)
    exchanged = parts.get("communication", 0)
    micro = f" in micro-batches of {rows}" if rows < whole.rows else ""
    release = "--release-gradients, " * task.setup.may_release(task.training.precision)
    remedies = {"full": f"{release}another optimizer or LoRA", "lora": "QLoRA or fewer targets"}
    remedy = remedies.get(task.training.train, "fewer targets")
    most, hint = max(
        (
            fixed,
            f"Weights, gradients and optimizer take {in_words(fixed, budget)} of it: try {remedy}, or more devices.",
        ),
        (exchanged, f"Buffers for several devices take {in_words(exchanged, budget)} of it: try another --sharding."),
        (least.context, f"The CUDA context takes {in_words(least.context, budget)} of it."),
    )
    if most <= budget / 2:
        hint = "Try a shorter sequence" + ("." if approximate else ", or approximate recipes (--allow approximate).")
    if any(_fits_expandable(each, task.limit(budget)) for each in totals.values()):
        hint = "With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True one fits."
    kind, (offered, needed, more) = "" if approximate else "exact ", apart(budget, need)
    return NegativeVerdict(
        f"No {kind}plan of {task.model} fits in {offered}: the smallest found takes {needed}{micro}, {more} more.", hint
    )


def _fits_expandable(found: Prediction, limit: int) -> bool:
    """Whether a step that does not fit does so with expandable segments."""
    expandable = replace(found, setup=replace(found.setup, expandable_segments=True))
    return found.peak.nbytes + found.context <= limit and expandable.total <= limit
