"""The planner's result: the best plan, further plans, and the frontier of memory against time. Plain data, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from memopt.errors import printable
from memopt.plan.recipe import Recipe, dump_recipe
from memopt.prediction.setup import GIB, MIB, Setup
from memopt.trace.training import Training


def in_words(nbytes: int, budget: int | None = None) -> str:
    """`nbytes` with a unit: MiB if the budget (or `nbytes`) is below 4 GiB and no whole number of GiB, else GiB."""
    name, unit = _unit(nbytes if budget is None else budget)
    return f"{nbytes / unit:.{2 if unit == GIB else 0 if nbytes >= 10 * MIB else 1}f} {name}"


def apart(budget: int, need: int) -> tuple[str, str, str]:
    """`budget`, a larger `need` and their difference in words, in a unit that tells `need` from `budget`."""
    for name, unit in (("GiB", GIB), ("MiB", MIB), ("bytes", 1)):
        digits = 2 if unit == GIB else 0 if unit == 1 or budget >= 10 * MIB else 1
        enough = math.ceil(need / unit * 10**digits) / 10**digits  # rounded up, so that a budget of the words fits
        sizes = (budget / unit, enough, (need - budget) / unit)
        offered, needed, more = (f"{size:.{digits}f} {name}" for size in sizes)
        if unit <= _unit(budget)[1] and offered != needed and sizes[2] >= 0.5 / 10**digits:
            break
    return offered, needed, more


def budget_name(nbytes: int) -> str:
    """Name of a recipe for a budget of `nbytes`, such as ``budget-24GiB``."""
    name, unit = _unit(nbytes)
    return f"budget-{nbytes / unit:.4g}{name}"


def _unit(nbytes: int) -> tuple[str, int]:
    return ("GiB", GIB) if nbytes >= 4 * GIB or (nbytes and nbytes % GIB == 0) else ("MiB", MIB)


@dataclass(frozen=True)
class Plan:
    """One way to train within a budget."""

    recipe: Recipe
    words: str
    """The levels of the blocks, and other differences from the recipe that the plan was made from."""
    batch: int
    """Rows in a micro-batch."""
    accumulation: int
    """Micro-batches in a step."""
    total: int
    """Bytes that the process takes of the device."""
    seconds: float
    """Seconds of forward and backward, by the cost model."""
    extra: float
    """Extra time over the fastest exact plan of the whole batch (whether that fits or not), as a share of its time."""
    traced: bool = True
    """False: `total` is an estimate by the block model."""

    @property
    def exact(self) -> bool:
        """Whether no gradient changes beyond rounding."""
        return not self.recipe.effects

    def __str__(self) -> str:
        micro = f"; {self.accumulation} micro-batches of {self.batch}" if self.accumulation > 1 else ""
        accuracy = "" if self.exact else f", gradients {self.recipe.accuracy}"
        about = "" if self.traced else "about "
        return f"{self.words}{micro}: {about}{in_words(self.total)}, {self.extra:+.1%} time{accuracy}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "words": self.words,
            "batch": self.batch,
            "accumulation": self.accumulation,
            "total_bytes": self.total,
            "seconds": self.seconds,
            "extra_time": self.extra,
            "exact": self.exact,
            "traced": self.traced,
            "recipe": self.recipe.model_dump(mode="json", exclude_defaults=True),
        }


@dataclass(frozen=True)
class Choice:
    """The fastest plan that fits, and further plans."""

    model: str
    training: str
    """The training step and the optimizer, in words."""
    card: str
    """Name of the card whose rates are used."""
    budget: int
    """Bytes of the budget."""
    plan: Plan
    others: tuple[Plan, ...] = ()
    assumptions: tuple[str, ...] = ()
    step: Training = field(default_factory=Training)
    """The training step with the whole batch."""
    setup: Setup = field(default_factory=Setup)
    blocks: tuple[str, ...] = ()
    """Names of the model's blocks."""
    margin: int = 0
    """Bytes of the budget that are left to the error of a prediction."""
    allocator: str = ""
    """How to lower the limit of PyTorch's allocator, if the plan fits only so."""
    notes: tuple[str, ...] = ()
    """Sentences about assumptions (model, batch) and about fields of the recipe without effect."""

    def __str__(self) -> str:
        """The text that `memopt report --budget` prints."""
        return "\n".join(map(printable, self.lines()))

    def lines(self) -> Iterator[str]:
        spare = self.budget - self.margin - self.plan.total
        yield f"{self.model}: {self.training}"
        margin = f" beside a margin of {in_words(self.margin, self.budget)}" if self.margin else ""
        yield f"Budget {in_words(self.budget)}: fits, {in_words(spare, self.budget)} to spare{margin}."
        yield f"Plan: {self.plan}"
        if self.allocator:
            yield f"Allocator: {self.allocator}."
        for other in self.others:
            yield f"Next: {other}"
        yield f"Time: forward and backward by the rates of {self.card}, against the fastest plan without a budget."
        yield from self.notes

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "model": self.model,
            "training": self.training,
            "card": self.card,
            "budget_bytes": self.budget,
            "plan": self.plan.to_dict(),
            "others": [other.to_dict() for other in self.others],
            "assumptions": [*self.assumptions, *([f"Allocator: {self.allocator}."] if self.allocator else ())],
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Frontier:
    """Plans that no other beats in both memory and time, from the fastest to the smallest."""

    model: str
    training: str
    card: str
    points: tuple[Plan, ...]
    notes: tuple[str, ...] = ()
    """As in `Choice`."""

    def __str__(self) -> str:
        """The text that `memopt report --frontier` prints."""
        return "\n".join(map(printable, self.lines()))

    def lines(self) -> list[str]:
        """The lines of the text: a heading, and one line for each point."""
        name, unit = ("GiB", GIB) if any(p.total >= GIB for p in self.points) else ("MiB", MIB)
        lines = [f"{self.model}: {self.training}", f"     {name}    time  plan"]
        lines += [f"{p.total / unit:8.2f} {p.extra:+7.1%}  {p.words}" for p in self.points]
        end = f"Sizes lie between two traced steps; times are by the rates of {self.card}. All plans are exact."
        return [*lines, end, *self.notes]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        plans = (each.to_dict() | {"recipe": dump_recipe(each.recipe)} for each in self.points)
        kept = ("words", "total_bytes", "extra_time", "exact", "recipe")
        points = [{key: plan[key] for key in kept} for plan in plans]
        said = {"model": self.model, "training": self.training, "card": self.card}
        return {**said, "points": points, "notes": list(self.notes)}
