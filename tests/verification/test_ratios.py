"""The limits of ratios of errors are quantiles of the F distribution."""

from __future__ import annotations

import math

import pytest
import torch

from memopt.verification.gradient import compare_gradients
from memopt.verification.ratios import (
    _QUANTILES,
    chance_ratio,
    independent_errors,
    independent_in_rank,
    typical_errors,
)

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize("n", [n for n in _QUANTILES if n >= 6])
def test_the_table_holds_quantiles_of_f(n):
    for runs in (1, 4):
        assert chance_ratio(n, runs) == pytest.approx(math.sqrt(stats.f.isf(1e-9, n, runs * n)), rel=0.006)


def test_between_two_rows_the_larger_limit_holds():
    assert chance_ratio(63) == chance_ratio(48) > chance_ratio(64)


def test_outliers_make_few_independent_errors():
    error = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    assert independent_errors(error, 10**9) == pytest.approx(4096, rel=0.1)
    error[:2] *= 1000
    assert independent_errors(error, 10**9) < 10
    assert independent_errors(error, 3) <= 3


def test_a_matrix_of_rank_one_has_the_independent_errors_of_its_rows_or_columns():
    generator = torch.Generator().manual_seed(0)
    noise, column, row = (torch.randn(*shape, generator=generator) for shape in ((32, 96), (32, 1), (1, 96)))
    assert independent_errors(column * row, 10**9) > 300
    assert independent_in_rank(column * row) == pytest.approx(32, rel=0.2)
    assert independent_in_rank((column * row).t()) == independent_in_rank(column * row)
    assert independent_in_rank(noise) == pytest.approx(32 * 32 * 96 / (32 + 96), rel=0.1)
    assert independent_in_rank(noise[0]) == independent_in_rank(0 * noise) == math.inf


@pytest.mark.parametrize(("rank", "passes"), [("one", True), ("full", False)])
def test_an_error_of_rank_one_may_be_larger_by_chance(rank, passes):
    """2.5 times that of four stock runs: the limit is 4.7 for 24 independent errors or more, and 2.3 for 1,024."""
    generator = torch.Generator().manual_seed(0)
    truth = {"key.weight": torch.ones(32, 96, dtype=torch.float64)}
    terms = (32, 96) if rank == "full" else (32, 1)

    def run(size):
        error = torch.randn(*terms, generator=generator).double().expand(32, 96)
        return {"key.weight": truth["key.weight"] + size * error / error.square().mean().sqrt()}

    stock = [run(1e-4) for _ in range(4)]
    *_, worst = compare_gradients([run(2.5e-4)], stock, truth, torch.float32, "fp64", 1.0, 1.0)
    assert (worst.id, worst.status == "pass") == ("gradient.worst_error_ratio", passes)


def test_luck_is_no_yardstick():
    truth = {f"layers.{i}.weight": torch.ones(4, 4) for i in range(3)} | {"norm.weight": torch.ones(4)}
    typical = typical_errors(dict(zip(truth, [1e-6, 1e-2, 1e-2, 1e-4], strict=True)), truth)
    assert typical["layers.0.weight"] == 1e-2
    assert typical["norm.weight"] == 1e-4
