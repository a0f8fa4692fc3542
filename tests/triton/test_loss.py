"""The Triton kernels of cross-entropy by rows: as accurate as PyTorch, every layout, nothing out of bounds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from memopt.kernels.base.launch import LaunchConfig, override
from memopt.kernels.loss import function_triton
from memopt.kernels.loss.function import fresh_statistics, row_factors
from memopt.kernels.loss.function_triton import launch_gradient, launch_statistics
from memopt.kernels.loss.reference import LossArguments, block_gradient, update_statistics
from tests.kernels.loss.test_loss import (
    by_blocks,
    draw,
    every_option,
    gradient_over,
    losses_and_lse,
    make_special,
    ours,
    stock,
    together,
)
from tests.triton.accuracy import assert_as_accurate, assert_same_special_values
from tests.triton.conftest import DEVICE
from tests.triton.memory import RedZones, lazily_huge

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy: inf - inf, exp(-inf)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def drawn(
    rows: int, classes: int, dtype: torch.dtype, *, weighted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    logits, target, dloss, weight = draw(rows, classes, dtype, weighted=weighted)
    return logits.to(DEVICE), target.to(DEVICE), dloss.to(DEVICE), None if weight is None else weight.to(DEVICE)


# Errors of losses are a unit in the last place, two roundings, and 3.5 are allowed. Of 24 rows, 16 count: where both
# err alike, their RMS differ by that much in 2 of 100 draws. Of 3 rows, 2 count, and their RMS do in 25 of 100.
@every_option
@every_dtype
@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (7, 2), (0, 5), (9, 257), (5, 8192), (24, 8200), (2, 66001)])
def test_loss_and_gradient_are_as_accurate_as_stocks(
    rows: int, classes: int, dtype: torch.dtype, smoothing: float, weighted: bool
) -> None:
    logits, target, dloss, weight = drawn(rows, classes, dtype, weighted=weighted)
    loss, gradient = ours(logits, target, dloss, weight, smoothing)
    stock_loss, stock_gradient = stock(logits, target, dloss, weight, smoothing, torch.float32)
    exact = None if weight is None else weight.double()
    true_loss, true_gradient = stock(logits.double(), target, dloss.double(), exact, smoothing, torch.float64)
    assert_as_accurate(loss, stock_loss, true_loss)
    assert_as_accurate(gradient, stock_gradient, true_gradient)
    loss, gradient = together(logits, target, dloss, weight, smoothing)
    assert_as_accurate(loss, stock_loss, true_loss)
    assert_as_accurate(gradient, stock_gradient, true_gradient)


def test_the_operators_run_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    for name in ("launch_statistics", "launch_gradient"):
        launch = getattr(function_triton, name)
        monkeypatch.setattr(function_triton, name, lambda *a, name=name, launch=launch: ran.append(name) or launch(*a))
    logits, target, dloss, weight = drawn(3, 7, torch.bfloat16, weighted=True)
    ours(logits, target, dloss, weight, 0.1)
    assert ran == ["launch_statistics", "launch_gradient"]
    together(logits, target, dloss, weight, 0.1)
    assert ran[2:] == ["launch_statistics"]


@every_option
def test_infinities_and_nan_give_what_stock_gives(smoothing: float, weighted: bool) -> None:
    logits, target, dloss, weight = drawn(8, 11, torch.float32, weighted=weighted)
    make_special(logits, target)
    stock_loss, stock_gradient = stock(logits, target, dloss, weight, smoothing, torch.float32)
    for compute in (ours, together):
        loss, gradient = compute(logits, target, dloss, weight, smoothing)
        assert_same_special_values(loss, stock_loss)
        assert_same_special_values(gradient, stock_gradient)


def test_lanes_that_see_nothing_but_minus_infinity_count_nothing() -> None:
    logits = torch.full((1, 9000), -math.inf, device=DEVICE)
    logits[0, 8990] = 3.0
    target = torch.tensor([8990], device=DEVICE)
    loss, lse = losses_and_lse(logits, target)
    assert loss.tolist() == [0.0]
    assert lse.tolist() == [[3.0, 0.0]]


def test_ignored_rows_are_zero_whatever_they_hold() -> None:
    logits, target, dloss, _ = drawn(6, 9, torch.float32, weighted=False)
    logits[2] = math.nan
    ignored = target == -100
    for compute in (ours, together):
        loss, gradient = compute(logits, target, dloss, None, 0.1)
        assert (loss[ignored] == 0).all()
        assert (gradient[ignored] == 0).all()


@every_dtype
@pytest.mark.parametrize("layout", ["gaps", "transposed", "contiguous", "one column"])
@pytest.mark.parametrize("full", [False, True], ids=["plain", "weights, smoothing"])
def test_every_layout_is_read_and_written_in_its_place_and_nothing_else(
    full: bool, layout: str, dtype: torch.dtype, red_zones: RedZones
) -> None:
    logits, target, dloss, weight = drawn(5, 1 if layout == "one column" else 70, dtype, weighted=full)
    if layout == "gaps":
        logits = torch.cat((logits, logits), 1)[:, :70]
    if layout == "transposed":
        logits = logits.t().contiguous().t()
    guarded, statistics = red_zones.guard(logits), fresh_statistics(logits)
    expected_statistics = statistics.clone()
    launch_statistics(guarded, statistics, weight, full, red_zones.guard(target))
    update_statistics(logits, expected_statistics, weight, full, target)
    factors = row_factors(target, dloss, LossArguments(weight, 0.1 if full else 0.0), logits.size(1))
    both = torch.empty_strided(logits.shape, logits.stride(), dtype=dtype, device=DEVICE)
    launch_statistics(guarded, fresh_statistics(logits), weight, full, red_zones.guard(target), factors, both)
    lse = torch.stack((statistics[:, 0], statistics[:, 1].log()), 1)
    out = torch.empty_strided(logits.shape, logits.stride(), dtype=dtype, device=DEVICE)
    expected = torch.empty_like(logits)
    launch_gradient(guarded, red_zones.guard(target), lse, factors, weight, out)
    block_gradient(logits, target, lse, factors, weight, expected)
    # One rounding each of a result of the other; exponentials of up to 60.
    bound = 60 * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps
    torch.testing.assert_close(statistics, expected_statistics, rtol=bound, atol=bound)
    for result in (out, both):
        torch.testing.assert_close(result, expected, rtol=bound, atol=bound)


@every_option
@pytest.mark.parametrize("size", [70, 300])
def test_blocks_of_columns_give_what_whole_rows_give(size: int, smoothing: float, weighted: bool) -> None:
    logits, target, dloss, weight = drawn(4, 300, torch.float32, weighted=weighted)
    logits[0, :70] = -60.0 if smoothing else -math.inf  # the first blocks hold nothing else
    expected = ours(logits, target, dloss, weight, smoothing)
    bound = 300 * torch.finfo(torch.float32).eps / 2  # sums of 300 terms in another order
    torch.testing.assert_close(
        by_blocks(logits, target, dloss, weight, smoothing, size), expected, rtol=bound, atol=bound
    )


@pytest.mark.parametrize("config", [LaunchConfig(1, 32, 1), LaunchConfig(1, 64, 2)], ids=str)
def test_results_do_not_depend_on_the_tiles(config: LaunchConfig) -> None:
    logits, target, dloss, weight = drawn(4, 300, torch.float32, weighted=True)
    expected = ours(logits, target, dloss, weight, 0.1)
    with override("loss_forward", config), override("loss_backward", config):
        for compute in (ours, together):
            torch.testing.assert_close(compute(logits, target, dloss, weight, 0.1), expected, rtol=3e-6, atol=3e-6)


def test_offsets_beyond_2_to_the_31_elements_are_right() -> None:
    # Neither a row's number nor the spacing exceeds 32 bits, their product does.
    logits, target, dloss, _ = drawn(5, 64, torch.bfloat16, weighted=False)
    expected = ours(logits, target, dloss, None, 0.0)
    huge = lazily_huge((5, 64), (2**29 + 16, 1), torch.bfloat16, DEVICE)
    huge.copy_(logits)
    loss, lse = losses_and_lse(huge, target)
    assert torch.equal(loss, expected[0])
    assert torch.equal(gradient_over(huge, target, lse, dloss), expected[1])
