"""The planner's result: a plan, the next ones, and the frontier of memory against time. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from memopt.errors import printable
from memopt.plan.recipe import Recipe, dump_recipe
from memopt.prediction.setup import Setup
from memopt.trace.training import Training

GIB, MIB = 1 << 30, 1 << 20


def in_words(nbytes: int, budget: int | None = None) -> str:
    """In MiB if it, or the budget that it is part of, is less than four GiB and not a whole number of GiB."""
    name, unit = _unit(nbytes if budget is None else budget)
    return f"{nbytes / unit:.{2 if unit == GIB else 0 if nbytes >= 10 * MIB else 1}f} {name}"


def budget_name(nbytes: int) -> str:
    """Of a recipe for so many bytes: ``budget-24GiB``."""
    name, unit = _unit(nbytes)
    return f"budget-{nbytes / unit:.4g}{name}"


def _unit(nbytes: int) -> tuple[str, int]:
    return ("GiB", GIB) if nbytes >= 4 * GIB or (nbytes and nbytes % GIB == 0) else ("MiB", MIB)


@dataclass(frozen=True)
class Plan:
    """One way to train within a budget."""

    recipe: Recipe
    words: str
    """The levels of the blocks, and what else differs from the recipe that it was made from."""
    batch: int
    """Rows in a micro-batch."""
    accumulation: int
    """Micro-batches in a step."""
    total: int
    """Bytes that the process takes of the device."""
    seconds: float
    """Of forward and backward, by the cost model."""
    extra: float
    """Extra time over the fastest exact plan of the whole batch (whether that fits or not), as a share of its time."""
    traced: bool = True
    """False: `total` is the block model's."""

    @property
    def exact(self) -> bool:
        """Whether no gradient changes beyond rounding."""
        return not self.recipe.effects

    def __str__(self) -> str:
        micro = f"; {self.accumulation} micro-batches of {self.batch}" if self.accumulation > 1 else ""
        accuracy = "" if self.exact else f", approximate (gradient off by up to {self.recipe.gradient_error:.0%})"
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
    """The fastest plan that fits, and the next ones."""

    model: str
    training: str
    """In words, with the optimizer."""
    card: str
    """The card that gives the rates."""
    budget: int
    """Bytes."""
    plan: Plan
    others: tuple[Plan, ...] = ()
    assumptions: tuple[str, ...] = ()
    step: Training = field(default_factory=Training)
    """The whole batch."""
    setup: Setup = field(default_factory=Setup)
    blocks: tuple[str, ...] = ()
    """Of the model."""

    def __str__(self) -> str:
        """What `memopt report --budget` prints."""
        return "\n".join(map(printable, self.lines()))

    def lines(self) -> Iterator[str]:
        yield f"{self.model}: {self.training}"
        yield f"Budget {in_words(self.budget)}: fits, {in_words(self.budget - self.plan.total, self.budget)} free."
        yield f"Plan: {self.plan}"
        for other in self.others:
            yield f"Next: {other}"
        yield f"Time is that of forward and backward by the rates of {self.card}, beside every block as fast as it can."

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "model": self.model,
            "training": self.training,
            "card": self.card,
            "budget_bytes": self.budget,
            "plan": self.plan.to_dict(),
            "others": [other.to_dict() for other in self.others],
            "assumptions": list(self.assumptions),
        }


@dataclass(frozen=True)
class Frontier:
    """Plans that no other beats in both memory and time, from the fastest to the smallest."""

    model: str
    training: str
    card: str
    points: tuple[Plan, ...]

    def __str__(self) -> str:
        """What `memopt report --frontier` prints."""
        return "\n".join(map(printable, self.lines()))

    def lines(self) -> list[str]:
        """A line a point."""
        name, unit = ("GiB", GIB) if any(p.total >= GIB for p in self.points) else ("MiB", MIB)
        lines = [f"{self.model}: {self.training}", f"     {name}    time  plan"]
        lines += [f"{p.total / unit:8.2f} {p.extra:+7.1%}  {p.words}" for p in self.points]
        return [*lines, f"Times by the rates of {self.card}; every point is exact."]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        plans = (each.to_dict() | {"recipe": dump_recipe(each.recipe)} for each in self.points)
        kept = ("words", "total_bytes", "extra_time", "exact", "recipe")
        points = [{key: plan[key] for key in kept} for plan in plans]
        return {"model": self.model, "training": self.training, "card": self.card, "points": points}
