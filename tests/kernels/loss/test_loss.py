"""Cross-entropy by rows is PyTorch's own, and never holds an fp32 copy of the logits."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memopt.kernels.loss import reference
from memopt.kernels.loss.function import (
    LeanCrossEntropyFunction,
    block_gradient_,
    fresh_statistics,
    lean_cross_entropy,
    row_factors,
    row_losses,
    statistics_,
)
from memopt.kernels.loss.reference import LossArguments
from memopt.torch_compat import FakeTensorMode
from tests.triton.accuracy import assert_as_accurate, assert_same_special_values

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
OPTIONS = list(itertools.product((0.0, 0.1), (False, True)))

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_option = pytest.mark.parametrize(
    ("smoothing", "weighted"), OPTIONS, ids=[f"smoothing {s}, {'weights' if w else 'plain'}" for s, w in OPTIONS]
)


def draw(
    rows: int, classes: int, dtype: torch.dtype = torch.float32, *, weighted: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Logits as large as a trained model's, targets with every third ignored, dloss, weights."""
    generator = torch.Generator().manual_seed(rows * 100003 + classes)
    logits = (8 * torch.randn(rows, classes, generator=generator, dtype=torch.float64) + 5).to(dtype)
    target = torch.randint(0, classes, (rows,), generator=generator)
    # Some rows are sure of their target, so that p - 1 is small.
    for row in range(0, rows, 2):
        logits[row, target[row]] = 30
    target[2::3] = -100
    dloss = torch.randn(rows, generator=generator, dtype=torch.float64)
    weight = torch.rand(classes, generator=generator, dtype=torch.float64) + 0.5 if weighted else None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return logits, target, dloss.to(wide), None if weight is None else weight.to(wide)


def stock(
    logits: Tensor, target: Tensor, dloss: Tensor, weight: Tensor | None, smoothing: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Loss and gradient of PyTorch on the logits in `dtype`."""
    logits = logits.detach().requires_grad_()
    weight = None if weight is None else weight.to(dtype)
    loss = F.cross_entropy(logits.to(dtype), target, weight, reduction="none", label_smoothing=smoothing)
    loss.backward(dloss.to(dtype))
    assert logits.grad is not None
    return loss.detach(), logits.grad


def losses_and_lse(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, smoothing: float = 0.0, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """The loss of each row, and what its gradient needs."""
    ctx = SimpleNamespace(save_for_backward=lambda *saved: vars(ctx).update(saved=saved))
    loss = LeanCrossEntropyFunction.forward(ctx, logits, target, weight, smoothing, ignore_index)
    return loss, ctx.saved[2]


def gradient_over(
    logits: Tensor, target: Tensor, lse: Tensor, dloss: Tensor, weight: Tensor | None = None, smoothing: float = 0.0,
    ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """The gradient, written over the logits."""
    factors = row_factors(target, dloss, LossArguments(weight, smoothing, ignore_index), logits.size(1))
    return block_gradient_(logits, target.long(), lse, factors, weight=weight)


def ours(
    logits: Tensor, target: Tensor, dloss: Tensor, weight: Tensor | None, smoothing: float
) -> tuple[Tensor, Tensor]:
    logits = logits.clone()
    loss, lse = losses_and_lse(logits, target, weight, smoothing)
    gradient = gradient_over(logits, target, lse, dloss, weight, smoothing)
    assert gradient is logits
    return loss, gradient


def together(
    logits: Tensor, target: Tensor, dloss: Tensor, weight: Tensor | None, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Loss and gradient from one call."""
    logits, arguments, statistics = logits.clone(), LossArguments(weight, smoothing), fresh_statistics(logits)
    factors = row_factors(target, dloss, arguments, logits.size(1))
    options = {"weight": weight, "smoothed": bool(smoothing), "factors": factors, "out": logits}
    statistics_(logits, statistics, target, **options)
    return row_losses(statistics, target, arguments, logits.size(1))[0], logits


def by_blocks(
    logits: Tensor, target: Tensor, dloss: Tensor, weight: Tensor | None, smoothing: float, size: int
) -> tuple[Tensor, Tensor]:
    """Loss and gradient where only a block of columns is there at a time."""
    arguments, statistics = LossArguments(weight, smoothing), fresh_statistics(logits)
    parts = [slice(start, start + size) for start in range(0, logits.size(1), size)]
    for part in parts:
        of_block = None if weight is None else weight[part]
        local = target - part.start
        statistics_(logits[:, part].clone(), statistics, local, weight=of_block, smoothed=bool(smoothing))
    loss, lse = row_losses(statistics, target, arguments, logits.size(1))
    factors = row_factors(target, dloss, arguments, logits.size(1))
    gradients = [
        block_gradient_(
            logits[:, part].clone(), target - part.start, lse, factors, weight=None if weight is None else weight[part]
        )
        for part in parts
    ]
    return loss, torch.cat(gradients, 1)


@every_option
@every_dtype
@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (7, 2), (33, 257), (0, 5), (3, 65537)])
def test_loss_and_gradient_are_as_accurate_as_stocks(
    rows: int, classes: int, dtype: torch.dtype, smoothing: float, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_PIECE", 10 * 257)  # several pieces, and a rest
    logits, target, dloss, weight = draw(rows, classes, dtype, weighted=weighted)
    wide = dloss.dtype
    loss, gradient = ours(logits, target, dloss, weight, smoothing)
    stock_loss, stock_gradient = stock(logits, target, dloss, weight, smoothing, wide)
    exact = None if weight is None else weight.double()
    true_loss, true_gradient = stock(logits.double(), target, dloss.double(), exact, smoothing, torch.float64)
    if dtype == torch.float64:
        # Sums of as many terms as there are classes, and exponentials of up to 70, whose error is as many roundings.
        bound = (classes + 100) * torch.finfo(dtype).eps / 2
        torch.testing.assert_close((loss, gradient), (true_loss, true_gradient), rtol=bound, atol=bound)
    else:
        assert_as_accurate(loss, stock_loss, true_loss)
        assert_as_accurate(gradient, stock_gradient, true_gradient)


@every_option
@every_dtype
@pytest.mark.parametrize("size", [64, 300])
def test_blocks_of_columns_give_what_whole_rows_give(
    size: int, dtype: torch.dtype, smoothing: float, weighted: bool
) -> None:
    logits, target, dloss, weight = draw(9, 300, dtype, weighted=weighted)
    logits[0, :70] = -math.inf  # the first blocks hold nothing else
    if smoothing:
        logits[0, :70] = -60.0
    expected = ours(logits, target, dloss, weight, smoothing)
    # Sums of 300 terms in another order, before one rounding to the dtype.
    bound = 300 * torch.finfo(dloss.dtype).eps / 2
    for result, other in zip(by_blocks(logits, target, dloss, weight, smoothing, size), expected, strict=True):
        rounding = torch.finfo(result.dtype).eps
        torch.testing.assert_close(result, other, rtol=bound + rounding, atol=bound)


@every_option
@every_dtype
def test_loss_and_gradient_together_are_those_of_two_calls(
    dtype: torch.dtype, smoothing: float, weighted: bool
) -> None:
    given = draw(9, 300, dtype, weighted=weighted)
    assert all(map(torch.equal, together(*given, smoothing), ours(*given, smoothing)))


def make_special(logits: Tensor, target: Tensor) -> None:
    """Infinities and NaN at the target, beside it, and in all of a row; `logits` are (8, 11)."""
    target[:] = torch.arange(8)
    logits[0, 5], logits[1, 1], logits[2, 5], logits[3, 3] = -math.inf, -math.inf, math.inf, math.inf
    logits[4, 0], logits[5], logits[6, :6] = math.nan, -math.inf, -math.inf


@every_option
def test_infinities_and_nan_give_what_stock_gives(smoothing: float, weighted: bool) -> None:
    logits, target, dloss, weight = draw(8, 11, weighted=weighted)
    make_special(logits, target)
    loss, gradient = ours(logits, target, dloss, weight, smoothing)
    stock_loss, stock_gradient = stock(logits, target, dloss, weight, smoothing, torch.float32)
    assert_same_special_values(loss, stock_loss)
    assert_same_special_values(gradient, stock_gradient)


def test_ignored_rows_are_zero_whatever_they_hold() -> None:
    logits, target, dloss, _ = draw(6, 9)
    logits[2], target[5] = math.nan, 4
    for ignore_index, targets in ((-100, target), (4, target.masked_fill(target == -100, 4))):
        kept, ignored = logits.clone(), targets == ignore_index
        assert ignored.any()
        loss, lse = losses_and_lse(kept, targets, ignore_index=ignore_index)
        gradient = gradient_over(kept, targets, lse, dloss, ignore_index=ignore_index)
        assert (loss[ignored] == 0).all()
        assert (gradient[ignored] == 0).all()


@pytest.mark.parametrize("layout", ["gaps", "transposed", "expanded dloss"])
def test_strided_tensors_are_written_where_they_are(layout: str) -> None:
    logits, target, dloss, _ = draw(12, 10)
    expected = ours(logits, target, torch.ones_like(dloss), None, 0.0)
    if layout == "gaps":
        logits = torch.cat((logits, logits), 1)[:, :10]
    if layout == "transposed":
        logits = logits.t().contiguous().t()
    dloss = torch.ones(()).expand(12) if layout == "expanded dloss" else torch.ones(12)
    before = logits.stride()
    loss, lse = losses_and_lse(logits, target)
    gradient = gradient_over(logits, target, lse, dloss)
    assert gradient.data_ptr() == logits.data_ptr()
    assert gradient.stride() == before
    torch.testing.assert_close((loss, gradient), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("target", [5, -1, -101])
def test_a_target_out_of_range_is_stocks_error(target: int) -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        lean_cross_entropy(torch.zeros(2, 5), torch.tensor([0, target]))


def test_targets_may_be_bytes() -> None:
    logits, _, dloss, _ = draw(4, 7)
    target = torch.tensor([0, 6, 3, 2])
    for of_bytes, of_words in zip(
        ours(logits, target.byte(), dloss, None, 0.1), ours(logits, target, dloss, None, 0.1), strict=True
    ):
        assert torch.equal(of_bytes, of_words)


class Allocations(TorchDispatchMode):
    """The largest result of an operation, in bytes; views and what is written in place left out."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made._base is None and not any(made is a for a in args):
            given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
            if made.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, made.numel() * made.element_size())
        return made


@pytest.mark.parametrize("autocast", [False, True])
def test_no_copy_of_the_logits_is_made_but_of_a_few_rows(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_PIECE", 4 * 1000)
    logits, target, dloss, weight = draw(64, 1000, torch.bfloat16, weighted=True)
    with Allocations() as made, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, lse = losses_and_lse(logits, target, weight, 0.1)
        gradient_over(logits, target, lse, dloss, weight, 0.1)
    assert made.largest == 4 * 1000 * 4
    assert loss.dtype == torch.float32


def test_autocast_changes_nothing() -> None:
    logits, target, dloss, weight = draw(9, 300, weighted=True)
    expected = ours(logits, target, dloss, weight, 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        loss, gradient = ours(logits, target, dloss, weight, 0.1)
    assert torch.equal(loss, expected[0])
    assert torch.equal(gradient, expected[1])


# --- lean --------------------------------------------------------------------------------------------------------


@every_option
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_lean_is_the_loss_of_the_upcast_logits(reduction: Any, smoothing: float, weighted: bool) -> None:
    logits, target, dloss, weight = draw(33, 257, torch.bfloat16, weighted=weighted)
    options = {"weight": weight, "label_smoothing": smoothing, "reduction": reduction}
    results = []
    for function, x in (
        (lean_cross_entropy, logits),
        (F.cross_entropy, logits.float()),
        (F.cross_entropy, logits.double()),
    ):
        if x.dtype == torch.float64 and weight is not None:
            options["weight"] = weight.double()
        x = x.detach().requires_grad_()
        loss = function(x, target, **options)
        loss.backward((dloss if reduction == "none" else torch.tensor(0.7)).to(loss.dtype))
        assert x.grad is not None
        results.append((loss.detach(), x.grad))
    (loss, gradient), (stock_loss, stock_gradient), (true_loss, true_gradient) = results
    assert_as_accurate(gradient, stock_gradient.bfloat16(), true_gradient)
    if reduction == "none":
        assert_as_accurate(loss, stock_loss, true_loss)
    else:
        # A sum of 33 positive numbers in any order, each of a few roundings; and one quotient.
        torch.testing.assert_close(loss.double(), true_loss, rtol=40 * torch.finfo(torch.float32).eps / 2, atol=0)


def test_lean_saves_the_logits_themselves_and_does_not_write_to_them() -> None:
    logits, target, _, _ = draw(33, 257, torch.bfloat16)
    before = logits.clone()
    x = logits.requires_grad_() * 1
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = lean_cross_entropy(x, target)
    assert [tensor.numel() for tensor in saved if tensor.numel() > 2 * 33] == [33 * 257]
    assert any(tensor.data_ptr() == x.data_ptr() for tensor in saved)
    first = torch.autograd.grad(loss, logits, retain_graph=True)
    second = torch.autograd.grad(loss, logits)
    assert torch.equal(first[0], second[0])
    assert torch.equal(x, before)


def test_lean_of_rows_that_are_all_ignored_is_nan_and_its_gradient_as_stocks() -> None:
    results = []
    for function in (lean_cross_entropy, F.cross_entropy):
        logits = torch.randn(3, 5, requires_grad=True)
        loss = function(logits, torch.full((3,), -100))
        loss.backward()
        results.append((loss.detach(), logits.grad))
    assert results[0][0].isnan()
    assert results[1][0].isnan()
    assert_same_special_values(results[0][1], results[1][1])


def test_lean_has_no_second_derivative_and_says_so() -> None:
    logits, target, _, _ = draw(3, 5)
    logits.requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(lean_cross_entropy(logits, target), logits, create_graph=True)


class _Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_trace_on_fake_tensors_has_as_many_operations_for_many_rows_as_for_few() -> None:
    counts = []
    for rows in (2, 600):
        with FakeTensorMode(), _Operations() as operations:
            logits, target = torch.empty(rows, 50000, dtype=torch.bfloat16), torch.zeros(rows, dtype=torch.int64)
            losses, lse = losses_and_lse(logits, target, None, 0.1)
            dlogits = gradient_over(logits, target, lse, losses, None, 0.1)
        assert dlogits is logits
        counts.append(operations.count)
    assert counts[0] == counts[1]
