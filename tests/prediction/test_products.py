"""The products that a predicted step computes on a CUDA device: how many, and in which dtype."""

from __future__ import annotations

from functools import cache

import pytest

from memopt.plan.recipe import load_recipe
from memopt.trace.events import Trace
from memopt.trace.trace import trace
from memopt.trace.training import Checkpointing, Step, Training
from tests.trace.builders import named_config, sites_of


@cache
def traced(name: str, patched: bool, checkpointing: Checkpointing = "none") -> Trace:
    config = named_config(name)
    recipe = load_recipe("exact-unfolded") if patched else None
    return trace(Step(config, Training(2, 24, checkpointing=checkpointing), sites_of(config), recipe))


def flops(found: Trace, itemsize: int | None = None) -> int:
    return sum(each.flops for each in found.operations if itemsize in (None, each.itemsize))


def test_no_product_of_a_loss_in_parts_is_in_fp32() -> None:
    found = traced("llama", True)
    assert flops(found, 2) > 0
    assert flops(found, 4) == flops(traced("llama", False), 4)  # older rotary embeddings have one of their own


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_a_patched_block_that_runs_again_stops_where_the_stock_block_does(name: str) -> None:
    stock, patched = (flops(traced(name, each, "full")) - flops(traced(name, each)) for each in (False, True))
    assert patched == stock > 0
