"""The largest size that fits."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from memopt.plan.recipe import load_recipe
from memopt.prediction.headline import Largest
from memopt.prediction.largest import Scaled, largest
from memopt.prediction.peak import Prediction, predict
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


def test_it_is_the_last_that_fits_or_near_it_whatever_a_sketch_misses() -> None:
    chance = random.Random(0)
    for _ in range(2000):
        base, slope, bend, extra = (chance.randrange(*span) for span in ((0, 900), (1, 60), (1, 90), (0, 60)))
        most, start = chance.randrange(1, 200), chance.randrange(1, 250)
        extra *= chance.randrange(2)
        asked: dict[int, int] = {}

        def need(rows: int, base: int = base, slope: int = slope, bend: int = bend, extra: int = extra) -> int:
            return (base + slope * rows + extra * max(0, rows - bend)) * GIB

        def noted(rows: int, asked: dict[int, int] = asked, need: Callable[[int], int] = need) -> int:
            asked[rows] = need(rows)
            return asked[rows]

        found = largest(noted, 1000 * GIB, start=start, most=most, sketched=sketches(need, slope * GIB))
        right = max((rows for rows in range(1, most + 1) if need(rows) <= 1000 * GIB), default=0)
        assert all((rows <= found.value) == (size <= 1000 * GIB) for rows, size in asked.items())
        if not extra or found.value == right:
            assert found == Largest(right, is_all=right == most)
        else:
            assert min(abs(found.value - rows) / rows for rows in list(asked)[1:]) < 0.25


def test_one_prediction_beside_the_first_is_enough_where_its_sketch_is_right() -> None:
    asked: list[int] = []

    def need(rows: int) -> int:
        asked.append(rows)
        return (10_000 + 70 * rows) * GIB

    sketched = sketches(lambda rows: (10_000 + 70 * rows) * GIB, 70 * GIB)
    assert largest(need, 60_000 * GIB, start=1, most=5000, sketched=sketched).value == 714
    assert asked == [1, 714]


def test_a_sketch_simulates_the_allocator_for_few_sizes() -> None:
    asked: list[float] = []

    class Followed(Told):
        """Its allocator holds a tenth more than lives."""

        def needs(self, times: float) -> float:
            asked.append(times)
            return 1.1 * self.live(times)

    def need(rows: int) -> int:
        return int(1.1 * (10_000 + 70 * rows))

    found = largest(need, 60_000, start=1, most=5000, sketched=lambda rows: Followed(rows, 10_000 + 70 * rows, 70))
    assert found.value == 636
    assert len(asked) <= 8


def test_few_predictions_are_enough_on_steps() -> None:
    """What a small model reserves grows by whole segments, of which a sketch may tell little."""
    for wide, limit in ((37, 900), (100, 520), (9, 1500), (450, 600)):
        asked: list[int] = []

        def need(rows: int, wide: int = wide) -> int:
            asked.append(rows)  # noqa: B023
            return (500 + 20 * (rows // wide) + (rows > 250)) << 20

        sketched = sketches(need, (20 << 20) // wide)
        found = largest(need, limit << 20, start=1, most=512, sketched=sketched).value
        assert need(found) <= (limit + 20) << 20
        assert found == 512 or need(found + wide + 1) > limit << 20
        assert len(set(asked)) <= 9


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


@pytest.mark.parametrize(
    ("name", "recipe", "training", "by_length"),
    [
        ("llama", None, Training(2, 64), True),
        ("llama", "exact-levels", Training(2, 64), False),
        pytest.param("gpt2", "exact-unfolded", Training(2, 64, checkpointing="full"), False, marks=pytest.mark.slow),
        pytest.param("t5", "exact-unfolded", Training(2, 64, precision="bf16-mixed"), True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.rotates(2)
def test_a_printed_answer_is_that_of_predictions(
    name: str, recipe: str | None, training: Training, by_length: bool
) -> None:
    config = named_config(name)
    of = Step(config, training, sites_of(config), load_recipe(recipe) if recipe else None)
    known: dict[int, Prediction] = {}

    def at(number: int) -> Prediction:
        return predict(of.trained(**({"seq": 8 * number} if by_length else {"batch": number})))

    def need(number: int) -> int:
        known[number] = at(number)
        return known[number].needs

    def sketched(number: int) -> Scaled:
        return Scaled(known[number], (each for key, each in known.items() if key != number), by_length=by_length)

    for limit in (at(100).needs, at(700).needs + (1 << 20)):
        found = largest(need, limit, start=8, most=1000, sketched=sketched).value
        assert at(found).needs <= 1.005 * limit
        assert at(found + 1).needs >= 0.995 * limit
