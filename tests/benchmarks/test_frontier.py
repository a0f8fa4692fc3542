"""Which ways to checkpoint are faster than a plan."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.frontier import ROUNDING, Row, misses

ROW = Row("BERT", "every 2nd block", total=1 << 30, seconds=2.0, plan="", plan_total=1 << 30, plan_seconds=1.0)


def test_a_plan_that_is_faster_in_as_much_memory_is_as_promised() -> None:
    assert misses([ROW, replace(ROW, plan_seconds=2.0, plan_total=ROW.total + ROUNDING)]) == []


def test_a_plan_that_is_slower_or_larger_is_not() -> None:
    slower, larger = replace(ROW, plan_seconds=2.1), replace(ROW, plan_total=ROW.total + ROUNDING + 1)
    assert len(misses([slower, larger])) == 2
