"""Plans of tiny models, against every combination of levels, each traced."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

import memopt
from memopt.errors import NegativeVerdict
from memopt.plan.recipe import Recipe, load_recipe
from memopt.prediction.cards import find_card
from memopt.prediction.planner.choice import apart
from memopt.prediction.planner.levels import Levels, levels_of
from memopt.prediction.planner.measure import Measured
from memopt.prediction.planner.plan import Task, choose, frontier_of, recipes_with
from memopt.prediction.planner.training import _task
from memopt.prediction.setup import Setup
from memopt.trace.events import Trace
from memopt.trace.trace import trace
from memopt.trace.training import Step, Training
from memopt.walk.models.build import build_meta
from memopt.walk.observe import find_sites
from tests.factories import tiny_config, tiny_model
from tests.trace.builders import named_config, sites_of

#: Of a block of a tiny model: some of what its patches offer, so that every combination can be traced.
FEW = ("up_proj recomputed", "dense recomputed", "c_fc recomputed", "checkpointed")


def task_of(name: str, *, few: bool = True, layers: int = 2, **training: object) -> Task:
    """A task on the CPU, where a step takes its live bytes alone and no allocator's."""
    config = tiny_config(name)
    config.num_hidden_layers = layers
    step = replace(Training(batch=4, seq=64, cuda_kernels=False), **training)  # type: ignore[arg-type]
    sites = find_sites(build_meta(config))
    levels = replace(levels_of(sites, load_recipe("exact-unfolded")), narrower={})
    if few:
        levels = replace(levels, beyond=tuple(level for level in levels.beyond if level.words in FEW), heads={})

    def traced(recipe: Recipe, rows: int) -> Trace:
        return trace(Step(config, replace(step, batch=rows), sites, recipe))

    return Task(name, step, Setup(), find_card("rtx4090"), levels, traced)


def totals_of(task: Task) -> Mapping[tuple[int, ...], int]:
    """Every combination of levels -> the bytes of its traced step."""
    combinations = itertools.product(*task.levels.options)
    return {each: task.predicted(task.levels.recipe_at(each), task.training.batch, 1).total for each in combinations}


@pytest.fixture(scope="module")
def llama() -> Task:
    return task_of("llama")


def places_of(measured: Measured, levels: Sequence[int]) -> tuple[int, ...]:
    """The indices of the options in the block model that have these levels."""
    return tuple((0, *its).index(level) for level, its in zip(levels, measured.examples, strict=True))


def assert_nothing_cheaper_fits(task: Task, budgets: int) -> None:
    totals, measured = totals_of(task), task.measured(task.training.batch, 1)
    model = measured.model(task.card)
    times = {levels: model.time(places_of(measured, levels)) for levels in totals}
    draw = random.Random(0)
    for _ in range(budgets):
        budget = draw.randint(min(totals.values()), max(totals.values()) + 1000)
        plan = choose(task, budget).plan
        assert plan.traced
        assert plan.total <= budget
        best = min(time for levels, time in times.items() if totals[levels] <= budget)
        if plan.accumulation == 1:
            assert round(plan.seconds * 1e9) == best
        else:  # a split is tried where the search found no whole batch that fits, and costs no more than one that does
            assert round(plan.seconds * 1e9) <= best


def test_a_plan_fits_with_its_margin(llama: Task) -> None:
    budget = choose(llama, 1 << 30).plan.total
    assert choose(llama, budget).plan.total == budget
    uncertain = choose(replace(llama, margin=0.03), budget)
    assert uncertain.plan.total <= budget - uncertain.margin <= budget / 1.03
    assert choose(replace(llama, card=find_card("24GiB")), budget).card == "A100 80GB"


def test_no_cheaper_combination_of_levels_fits(llama: Task) -> None:
    assert_nothing_cheaper_fits(llama, 12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [
        pytest.param({"name": "llama", "few": False}, id="llama, all levels"),
        pytest.param({"name": "llama", "layers": 3, "train": "lora"}, id="llama, LoRA"),
        pytest.param({"name": "bert", "layers": 3}, id="bert"),
        pytest.param({"name": "gemma2", "layers": 2}, id="gemma2"),
    ],
)
def test_no_cheaper_combination_fits_in_larger_models(task: dict[str, object]) -> None:
    assert_nothing_cheaper_fits(task_of(**task), 40)  # type: ignore[arg-type]


def test_the_block_model_is_what_traces_say(llama: Task) -> None:
    measured = llama.measured(4, 1)
    model = measured.model(llama.card)
    for levels, total in totals_of(llama).items():
        assert model.peak(places_of(measured, levels)) == pytest.approx(total, rel=5e-3)


def test_what_fits_in_no_level_is_split_into_micro_batches(llama: Task) -> None:
    smallest = min(totals_of(llama).values())
    choice = choose(llama, smallest - 1)
    assert choice.plan.accumulation * choice.plan.batch == 4
    assert choice.plan.accumulation > 1
    assert choice.plan.total < smallest


def test_a_slow_plan_is_replaced_by_faster_micro_batches_unless_the_batch_is_kept(llama: Task) -> None:
    smallest = min(totals_of(llama).values())
    split, whole = choose(llama, smallest).plan, choose(replace(llama, keeps_batch=True), smallest).plan
    assert (whole.batch, whole.accumulation) == (4, 1)
    assert whole.extra > 0.05
    assert split.accumulation > 1
    assert split.seconds < whole.seconds
    assert max(split.total, whole.total) <= smallest


def test_a_budget_that_nothing_fits_says_how_far_it_is(llama: Task) -> None:
    with pytest.raises(
        NegativeVerdict, match=r"fits in 0\.0 MiB: the smallest found takes \d\.\d MiB in micro-batches of 1, .* more"
    ) as error:
        choose(llama, 1000)
    assert "Weights, gradients and optimizer take" in str(error.value)


def test_more_than_enough_memory_takes_no_more_time(llama: Task) -> None:
    choice = choose(llama, 1 << 30)
    assert choice.plan.extra == 0
    assert choice.others
    assert all(other.total <= choice.plan.total and other.extra > 0 for other in choice.others)


def test_approximate_recipes_are_taken_only_if_asked_for(llama: Task) -> None:
    assert recipes_with() == ()
    recipes = recipes_with("approximate")
    assert {recipe.name for recipe in recipes} >= {"int8", "mesa"}
    assert all(recipe.effects == {"approximate"} and not recipe.folds for recipe in recipes)


def test_an_approximate_recipe_is_taken_where_no_exact_plan_fits_and_can_be_used() -> None:
    task = task_of("llama", batch=64, seq=512, cuda_kernels=True)
    task = replace(task, levels=replace(task.levels, beyond=()), splits=False)
    [recipe] = (each for each in recipes_with("approximate") if each.name == "int8")
    own, coded = (task.predicted(each, 64, 1).total for each in (task.levels.recipe, recipe))
    assert coded < own
    with pytest.raises(NegativeVerdict):
        choose(task, own - 1)
    plan = choose(task, own - 1, approximate=[recipe]).plan
    assert (plan.total, plan.exact) == (coded, False)
    assert "gradients 10% off" in str(plan)
    model = memopt.patch(tiny_model("llama").train(), plan.recipe)
    assert f"recipe '{recipe.name}'" in str(memopt.summary(model))
    assert choose(task, own, approximate=[recipe]).plan.exact


def test_what_takes_most_of_a_budget_that_is_too_small_is_named(llama: Task) -> None:
    task = replace(llama, setup=Setup(sharding="zero2", devices=2))  # whose buckets are whole, however small a model is
    with pytest.raises(NegativeVerdict, match=r"Buffers for several devices take 954 MiB of it: try another --shard"):
        choose(task, 1 << 20)
    with pytest.raises(NegativeVerdict, match=r"The CUDA context takes \d+ MiB of it"):
        choose(task_of("llama", batch=1, cuda_kernels=True), 1 << 28)


@pytest.mark.rotates(4)
def test_no_plan_advises_to_allow_approximate_recipes_that_are_allowed() -> None:
    task = task_of("llama", batch=64, seq=128)
    task = replace(task, levels=replace(task.levels, beyond=()), splits=False)
    [recipe] = (each for each in recipes_with("approximate") if each.name == "int8")
    budget = min(task.predicted(each, 64, 1).total for each in (task.levels.recipe, recipe)) - 1
    with pytest.raises(NegativeVerdict, match=r"^No exact plan of .* or approximate recipes \(--allow approximate\)"):
        choose(task, budget)
    with pytest.raises(NegativeVerdict, match=r"^No plan of .* Try a shorter sequence\.$"):
        choose(task, budget, approximate=[recipe])


def test_a_frontier_goes_from_the_fastest_to_the_smallest(llama: Task) -> None:
    points = frontier_of(llama).points
    assert points[0].extra == 0
    assert [p.total for p in points] == sorted((p.total for p in points), reverse=True)
    assert [p.extra for p in points] == sorted(p.extra for p in points)
    totals = totals_of(llama).values()
    assert points[-1].total == pytest.approx(min(totals), rel=5e-3)
    assert points[0].total == pytest.approx(max(totals), rel=5e-3)


@pytest.fixture(scope="module")
def long() -> Task:
    """Of a row so long that what one block needs at once is most of a step."""
    config = named_config("llama", num_hidden_layers=4, intermediate_size=2048)
    of = Step(config, Training(1, 1 << 15, train="lora"), sites_of(config), load_recipe("exact-unfolded"))
    return _task("llama", of, Setup(), find_card("a100-80gb"))


@pytest.mark.rotates(4)
def test_where_one_block_needs_too_much_it_runs_by_tiles_and_groups_of_heads(long: Task) -> None:
    plain = replace(long, levels=replace(long.levels, narrower={}))
    budget = (frontier_of(long).points[-1].total + frontier_of(plain).points[-1].total) // 2
    with pytest.raises(NegativeVerdict):
        choose(plain, budget)
    plan = choose(long, budget).plan
    assert plan.words.endswith("; attention by groups of heads, modules by tiles of tokens")
    assert plan.total <= budget
    assert plan.recipe.model_dump()["tiles"]["method"] == "tokens"


@pytest.mark.slow
def test_blocks_by_tiles_are_split_into_micro_batches_too(long: Task) -> None:
    two = replace(long, training=replace(long.training, batch=2), _traces={})
    plan = choose(two, frontier_of(long).points[-1].total + (20 << 20)).plan
    assert (plan.batch, plan.accumulation) == (1, 2)
    assert plan.words.endswith("modules by tiles of tokens")


def test_settings_of_blocks_that_run_again_are_those_of_no_other(long: Task) -> None:
    levels = replace(long.levels, narrows=True)
    blocks = len(levels.blocks)
    assert levels.recipe_at([0] * (blocks + 1)) == long.levels.recipe_at([0] * (blocks + 1))
    assert levels.words([1, *[0] * blocks]) == long.levels.words([1, *[0] * blocks])


def test_released_gradients_are_not_split(long: Task) -> None:
    task = replace(task_of("llama"), setup=Setup(release_gradients=True))
    with pytest.raises(NegativeVerdict, match="fits in") as raised:
        choose(task, 1000)
    assert "micro-batches" not in str(raised.value)
    assert "--release" not in str(raised.value)


def test_a_frontier_has_both_and_its_smallest_plan_is_traced(long: Task) -> None:
    points = frontier_of(long).points
    assert [point.total for point in points] == sorted((point.total for point in points), reverse=True)
    assert [point.extra for point in points] == sorted(point.extra for point in points)
    assert not points[0].words.endswith("tokens")
    assert points[-1].words.endswith("modules by tiles of tokens")
    assert points[-1].total == long.predicted(points[-1].recipe, 1, 1).total


def test_levels_are_said_in_words() -> None:
    levels = Levels(load_recipe("exact-unfolded"), ("a", "b"))
    assert levels.words((0, 0, 0)) == "2 blocks as in 'exact-unfolded'"
    assert replace(levels, blocks=("a",)).words((0, 0)) == "1 block as in 'exact-unfolded'"


def test_a_budget_and_a_need_never_read_alike() -> None:
    assert apart(11 << 30, 12 << 30) == ("11.00 GiB", "12.00 GiB", "1.00 GiB")
    assert apart(11450 << 20, 11453 << 20) == ("11450 MiB", "11453 MiB", "3 MiB")
    assert apart(11 << 30, (11 << 30) + 1) == ("11811160064 bytes", "11811160065 bytes", "1 bytes")
    assert apart(100 << 20, (150 << 20) + 1) == ("100 MiB", "151 MiB", "50 MiB")
