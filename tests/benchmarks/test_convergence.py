"""`benchmarks.convergence`: runs of one seed are paired, and the rule notices a way that learns less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.convergence import AGAIN, STOCK, Run, Size, shortfalls, summarize, texts, train

TINY = Size(layers=1, hidden=16, heads=2, batch=2, seq=16, steps=3)


def runs(way: str, *losses: float) -> list[Run]:
    return [Run(way, seed, ((0, 5.0), (9, loss + 0.1), (10, loss)), 100, 50, 0.1) for seed, loss in enumerate(losses)]


def test_a_seed_gives_the_same_run_and_memopt_keeps_fewer_bytes() -> None:
    stock, again, patched = (train(way, 0, TINY) for way in (STOCK, STOCK, "exact-unfolded"))
    assert stock.curve == again.curve
    assert patched.loss == pytest.approx(stock.loss, rel=1e-5)
    assert patched.kept < stock.kept
    assert train(STOCK, 1, TINY).loss != stock.loss


def test_no_topic_is_learnt_and_held_out() -> None:
    learnt, held = ({bytes(row.tolist()) for row in rows} for rows in texts(replace(TINY, seq=64)))
    assert len(learnt) > 8 * len(held) > 0
    assert len(learnt & held) < len(held) // 20  # lines of a table, and the like


def test_a_way_that_learns_less_than_the_seeds_explain_falls_short() -> None:
    base = [*runs(STOCK, 2.0, 2.1, 2.2), *runs(AGAIN, 2.01, 2.09, 2.2)]
    assert shortfalls(summarize([*base, *runs("exact-levels", 2.005, 2.095, 2.201)])) == []
    (line,) = shortfalls(summarize([*base, *runs("exact-levels", 2.05, 2.15, 2.25)]))
    assert line.startswith("exact-levels: loss +0.0500 to stock")
    assert shortfalls(summarize([*base, *runs("int8", 2.3, 2.4, 2.5)])) == []  # shown, not judged
