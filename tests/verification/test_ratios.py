"""The limits of ratios of errors are quantiles of the F distribution."""

from __future__ import annotations

import math

import pytest
import torch

from memopt.verification.ratios import _QUANTILES, chance_ratio, independent_errors, typical_errors

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


def test_luck_is_no_yardstick():
    truth = {f"layers.{i}.weight": torch.ones(4, 4) for i in range(3)} | {"norm.weight": torch.ones(4)}
    typical = typical_errors(dict(zip(truth, [1e-6, 1e-2, 1e-2, 1e-4], strict=True)), truth)
    assert typical["layers.0.weight"] == 1e-2
    assert typical["norm.weight"] == 1e-4
