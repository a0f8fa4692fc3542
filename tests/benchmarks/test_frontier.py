"""Which other ways to save less are faster than a plan, and what the others are."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from transformers import PreTrainedModel

import benchmarks.frontier
from benchmarks.frontier import ROUNDING, Row, misses
from benchmarks.rivals import checkpoint_selectively, compile_blocks
from memopt.trace.events import Trace
from memopt.trace.trace import subject, trace
from memopt.trace.training import Step, Training
from tests.trace.builders import named_config, sites_of

GIB = 1 << 30
ROW = Row("BERT", "selective", GIB, 2.0, 1.5, plan="", plan_total=GIB, plan_seconds=1.0, plan_products=1.0)


def test_a_plan_that_is_faster_in_as_much_memory_is_as_promised() -> None:
    assert misses([ROW, replace(ROW, plan_seconds=2.0, plan_products=1.5, plan_total=ROW.total + ROUNDING)]) == []


@pytest.mark.parametrize("plan", [{"plan_seconds": 2.1}, {"plan_products": 1.6}])
def test_a_plan_that_is_slower_by_either_count_is_not(plan: dict[str, float]) -> None:
    assert len(misses([replace(ROW, **plan)])) == 1


def test_a_plan_that_is_larger_is_not() -> None:
    assert misses([replace(ROW, plan_total=ROW.total + ROUNDING + 1)])


def _nothing(model: PreTrainedModel) -> None:
    pass


def traced(prepare: Callable[[PreTrainedModel], None]) -> Trace:
    config = named_config("llama")
    of = Step(config, Training(2, 24), sites_of(config))
    model = subject(of)
    prepare(model.built.model)
    return trace(of, model)


def flops(found: Trace) -> int:
    return sum(each.flops for each in found.operations)


def test_selective_checkpointing_recomputes_no_product_or_every_second() -> None:
    stock, selective = flops(traced(_nothing)), flops(traced(checkpoint_selectively))
    assert selective == stock < flops(traced(partial(checkpoint_selectively, every_second=True)))


def test_a_compiled_block_recomputes_products_under_a_small_budget_alone() -> None:
    blocks = sites_of(named_config("llama")).blocks
    stock, roomy, tight = (
        flops(traced(prepare))
        for prepare in (_nothing, *(partial(compile_blocks, blocks=blocks, budget=budget) for budget in (0.8, 0.0)))
    )
    assert roomy == stock < tight


def test_the_file_names_its_command_and_a_plan_that_does_not_fit_is_no_number(tmp_path, monkeypatch) -> None:
    def refused(constant: str) -> None:
        raise AssertionError(constant)

    none = replace(ROW, plan="none fits", plan_total=0, plan_seconds=math.inf, plan_products=math.inf)
    monkeypatch.setattr(benchmarks.frontier, "rows", lambda case: iter([none]))
    file = tmp_path / "frontier.json"
    assert benchmarks.frontier.main(["--case", "vit", "--check", "--json", str(file)]) == 1
    content = json.loads(file.read_text(), parse_constant=refused)
    assert content["command"].startswith("python -m benchmarks.frontier --case vit --check --json")
    assert not content["dry_run"]
    assert content["rows"][0]["plan_seconds"] is None
