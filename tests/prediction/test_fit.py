"""The largest size that fits."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from memopt.plan.recipe import load_recipe
from memopt.prediction.headline import Largest
from memopt.prediction.largest import Scaled, largest
from memopt.prediction.peak import predict
from memopt.trace.training import Step, Training
from tests.trace.builders import named_config, sites_of

GIB = 1 << 30


@dataclass
class Told:
    """A sketch that knows `grows` bytes of what one more adds, and not what the allocator holds beside them."""

    number: int
    need: int
    grows: int

    def live(self, times: float) -> float:
        return self.need + self.grows * self.number * (times - 1)

    needs = live


def sketches(need: Callable[[int], int], grows: int) -> Callable[[int], Told]:
    return lambda number: Told(number, need(number), grows)


def test_it_is_the_last_that_fits_whatever_a_sketch_misses() -> None:
    chance = random.Random(0)
    for _ in range(2000):
        base, slope, bend, extra = (chance.randrange(*span) for span in ((0, 900), (1, 60), (1, 90), (0, 60)))
        most, start = chance.randrange(1, 200), chance.randrange(1, 250)

        def need(rows: int, base: int = base, slope: int = slope, bend: int = bend, extra: int = extra) -> int:
            return (base + slope * rows + extra * max(0, rows - bend)) * GIB

        found = largest(need, 1000 * GIB, start=start, most=most, sketched=sketches(need, slope * GIB))
        right = max((rows for rows in range(1, most + 1) if need(rows) <= 1000 * GIB), default=0)
        assert found == Largest(right, is_all=right == most)


def test_one_prediction_beside_the_first_is_enough_where_its_sketch_is_right() -> None:
    asked: list[int] = []

    def need(rows: int) -> int:
        asked.append(rows)
        return (10_000 + 70 * rows) * GIB

    sketched = sketches(lambda rows: (10_000 + 70 * rows) * GIB, 70 * GIB)
    assert largest(need, 60_000 * GIB, start=1, most=5000, sketched=sketched).value == 714
    assert asked == [1, 714]


def test_few_predictions_are_enough_on_steps() -> None:
    """What a small model reserves grows by whole segments, of which a sketch tells little."""
    for wide, limit in ((37, 900), (100, 520), (9, 1500), (450, 600)):
        asked: list[int] = []

        def need(rows: int, wide: int = wide) -> int:
            asked.append(rows)  # noqa: B023
            return (500 + 20 * (rows // wide) + (rows > 250)) << 20

        sketched = sketches(need, (20 << 20) // wide)
        found = largest(need, limit << 20, start=1, most=512, sketched=sketched).value
        assert need(found) <= limit << 20
        assert found == 512 or need(found + 1) > limit << 20
        assert len(set(asked)) <= 20


@pytest.mark.parametrize("recipe", [None, "exact-unfolded"])
def test_a_sketch_of_a_step_tells_what_more_rows_and_longer_ones_need(recipe: str | None) -> None:
    config = named_config("llama")
    of = Step(config, Training(2, 64), sites_of(config), load_recipe(recipe) if recipe else None)
    first = predict(of)
    for by_length, larger in ((False, of.trained(batch=8)), (True, of.trained(seq=256))):
        told, right = Scaled(first, by_length=by_length), predict(larger)
        assert told.needs(1) == first.needs
        assert told.live(4) == pytest.approx(1.03 * right.peak.nbytes + right.context, rel=0.02)
        assert told.needs(4) == pytest.approx(right.needs, rel=0.02)
