"""The search over levels of blocks, against every combination."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from memopt.prediction.planner.search import (
    BlockModel,
    Option,
    between,
    cheapest,
    fastest_that_fits,
    frontier,
    smallest,
    without,
)


def random_model(seed: int, *, most_blocks: int = 5, most_levels: int = 4) -> BlockModel:
    """Blocks of a few kinds, as models have them; numbers small enough for ties."""
    draw = random.Random(seed)

    def kind() -> tuple[Option, ...]:
        levels = range(draw.randint(1, most_levels))
        return tuple(Option(draw.randint(0, 20), draw.randint(0, 30), draw.randint(0, 15)) for _ in levels)

    kinds = [kind() for _ in range(draw.randint(1, 3))]
    blocks = tuple(draw.choice(kinds) for _ in range(draw.randint(1, most_blocks)))
    return BlockModel(blocks, floor=draw.randint(0, 30), rest=draw.randint(0, 5))


def combinations(model: BlockModel) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(len(options)) for options in model.blocks)))


@pytest.mark.parametrize("seed", range(200))
def test_no_cheaper_combination_fits(seed: int) -> None:
    model, limit = random_model(seed), random.Random(-seed).randint(10, 90)
    fitting = [chosen for chosen in combinations(model) if model.peak(chosen) <= limit]
    found = cheapest(model, limit)
    if found is None:
        assert not fitting
    else:
        assert found in fitting
        assert model.time(found) == min(map(model.time, fitting))


@pytest.mark.parametrize("seed", range(40))
def test_smallest_is_the_lowest_peak_of_all(seed: int) -> None:
    model = random_model(seed)
    assert smallest(model) == min(map(model.peak, combinations(model)))


@pytest.mark.parametrize("seed", range(20))
def test_nothing_beats_a_point_of_the_frontier(seed: int) -> None:
    model = random_model(seed)
    points = [(model.peak(chosen), model.time(chosen)) for chosen in frontier(model, points=10**6)]
    best = {
        (peak, time)
        for peak, time in ((model.peak(chosen), model.time(chosen)) for chosen in combinations(model))
        if not any(
            model.peak(other) <= peak
            and model.time(other) <= time
            and (model.peak(other), model.time(other)) != (peak, time)
            for other in combinations(model)
        )
    }
    assert set(points) == best
    assert points == sorted(points, reverse=True)


def test_of_equal_plans_the_first_blocks_save_the_least() -> None:
    model = BlockModel(((Option(10, 10, 1), Option(2, 12, 3)),) * 6)
    assert cheapest(model, 44) == (1, 1, 0, 0, 0, 0)


def test_of_equal_options_that_fit_the_first_is_taken_though_a_later_one_saves_less() -> None:
    model = BlockModel(((Option(10, 10, 1), Option(2, 10, 1)),) * 6)
    assert cheapest(model, 100) == (0,) * 6
    assert 1 in cheapest(model, 40)


def test_eighty_blocks_of_six_levels_take_no_time() -> None:
    unit = 1 << 24
    options = tuple(
        Option(saved * unit, need * unit, time)
        for saved, need, time in (
            (115, 130, 1_000_000), (88, 132, 1_041_003), (61, 133, 1_082_007), (56, 133, 1_101_003),
            (10, 120, 1_333_333), (1, 122, 1_340_000),
        )
    )  # fmt: skip
    model = BlockModel((options,) * 80)
    chosen = cheapest(model, model.peak(model.fastest) // 3)
    assert chosen is not None
    assert list(chosen) == sorted(chosen, reverse=True)  # the smallest levels first


class Traces:
    """A model whose traces differ from what the search goes by."""

    def __init__(self, model: BlockModel, error: Callable[[tuple[int, ...]], int]) -> None:
        self.model, self.error, self.asked = model, error, 0

    def __call__(self, chosen: tuple[int, ...]) -> int:
        self.asked += 1
        return self.model.peak(chosen) + self.error(chosen)


@pytest.mark.parametrize("seed", range(60))
def test_what_lives_beside_the_model_is_learnt_from_the_traces(seed: int) -> None:
    model, budget = random_model(seed), random.Random(-seed).randint(1010, 1090)
    traces = Traces(model, lambda chosen: 1000)
    fitting = [chosen for chosen in combinations(model) if model.peak(chosen) + 1000 <= budget]
    found = fastest_that_fits(model, budget, traces)
    assert (found is None) == (not fitting)
    if found is not None:
        assert found in fitting
        assert model.time(found) == min(map(model.time, fitting))


def test_what_a_much_larger_step_reserves_beside_is_not_that_of_a_plan() -> None:
    model = BlockModel(((Option(100, 110, 1), Option(10, 20, 2), Option(0, 12, 4)),) * 20 + ((Option(0, 0, 0),),))
    traces = Traces(model, lambda chosen: model.peak(chosen) // 2)
    found = fastest_that_fits(model, 330, traces)
    assert found is not None
    assert model.time(found) <= 40  # with every block at the second level it is 40, and takes 315


@pytest.mark.parametrize("seed", range(60))
def test_what_is_chosen_fits_by_its_trace(seed: int) -> None:
    model, draw = random_model(seed), random.Random(seed)
    errors = {chosen: draw.randint(-3, 3) for chosen in combinations(model)}
    traces = Traces(model, errors.__getitem__)
    budget = random.Random(-seed).randint(10, 90)
    found = fastest_that_fits(model, budget, traces)
    if found is not None:
        assert model.peak(found) + errors[found] <= budget
    assert traces.asked <= 10


def test_a_level_can_be_left_out() -> None:
    model = BlockModel(((Option(10, 10, 1), Option(2, 12, 3), Option(1, 12, 4)),) * 4)
    only = without(model, [[True, False, True]] * 4)
    found = cheapest(only, 22)
    assert found is not None
    assert 1 not in found


def test_a_batch_lies_between_two() -> None:
    one = BlockModel(((Option(10, 20, 5),),), floor=4, rest=2)
    many = BlockModel(((Option(40, 50, 35),),), floor=4, rest=8)
    assert between(one, many, 1 / 3) == BlockModel(((Option(20, 30, 15),),), floor=4, rest=4)
