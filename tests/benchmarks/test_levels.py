"""The plans of `python -m benchmarks.levels`, carried out on a small model."""

from __future__ import annotations

import copy

import pytest
import torch

import memopt
from benchmarks.levels import Level, Point, levels, misses
from memopt.patches.linear.decide import output_levels
from memopt.patches.swap import swap_state
from tests.factories import tiny_inputs, tiny_model

LAYERS = 4


def test_each_plan_does_more_work_than_the_one_before():
    found = levels(16, 2)
    assert len(found) >= 12
    assert len(set(found)) == len(found)
    assert found[0] == Level((0, 0), 0)
    assert found[-1] == Level((16, 16), 16)


def test_what_is_not_monotone_is_said():
    points = [Point(Level((0,), n), kept=100 - n, peak=100 - n, again=n / 10) for n in range(12)]
    assert misses(points) == []
    assert any("points, at least" in line for line in misses(points[:5]))
    assert any("peak rises" in line for line in misses([*points, Point(Level((0,), 12), 80, 120, 2.0)]))
    assert any("work falls" in line for line in misses([*points, Point(Level((0,), 12), 80, 80, 0.1)]))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_gradients_of_every_plan_are_the_stock_models(name):
    stock, inputs = tiny_model(name, num_hidden_layers=LAYERS), tiny_inputs(name)
    stock.config.use_cache = False
    stock(**inputs).loss.backward()
    expected = {key: p.grad for key, p in stock.named_parameters()}
    largest = max(float(each.norm()) for each in expected.values())
    plan = memopt.plan_for(stock, memopt.load_recipe("exact-unfolded", ["linears.recompute=auto"]))
    names = {block: found[:2] for block, found in output_levels(plan).items()}
    assert len(names) == LAYERS
    for level in levels(LAYERS, max(map(len, names.values())), parts=2):
        recipe = memopt.load_recipe("exact-unfolded", level.settings(plan.sites.blocks, names))
        model = memopt.patch(copy.deepcopy(stock), recipe)
        model.zero_grad()
        model(**inputs).loss.backward()
        for key, p in model.named_parameters():
            error = float((p.grad - expected[key]).norm())
            assert error <= 1e-5 * max(float(expected[key].norm()), 1e-3 * largest), (level, key)


def test_the_shipped_recipe_checkpoints_every_second_block_and_recomputes_outputs_in_the_others():
    model = memopt.patch(tiny_model("llama", num_hidden_layers=LAYERS), "exact-levels")
    assert [swap_state(layer).is_checkpointed for layer in model.model.layers] == [True, False, True, False]
    assert "recomputed" in str(memopt.summary(model))
    assert torch.isfinite(model(**tiny_inputs("llama")).loss)
