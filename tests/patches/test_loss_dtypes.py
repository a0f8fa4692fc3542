"""The dtype of a loss of logits that are never whole, for targets and class weights of any dtype: that of stock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt.patches.loss.module import patch_head

ROWS, WIDTH, CLASSES = 12, 16, 40
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def losses(head: nn.Linear, x: Tensor, target: Tensor, **options: Any) -> Tensor | str:
    """The loss; the name of its error if it raises one."""
    try:
        found: Tensor = F.cross_entropy(head(x), target, **options)
    except RuntimeError as error:
        return type(error).__name__
    found.sum().backward()
    return found.detach()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("targets", [torch.long, *DTYPES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_loss_has_the_stock_dtype(
    dtype: torch.dtype, targets: torch.dtype, weighted: torch.dtype | None, smoothing: float, reduction: str
) -> None:
    torch.manual_seed(0)
    found = []
    target = torch.randint(0, CLASSES, (ROWS,))
    if targets.is_floating_point:
        target = torch.randn(ROWS, CLASSES).softmax(-1).to(targets)
    weight = None if weighted is None else torch.rand(CLASSES).to(weighted) + 0.5
    x = torch.randn(ROWS, WIDTH).to(dtype)
    for is_patched in (False, True):
        torch.manual_seed(1)
        head = nn.Linear(WIDTH, CLASSES, bias=False, dtype=dtype)
        if is_patched:
            patch_head(head, WIDTH, CLASSES)
        loss = losses(head, x, target, weight=weight, label_smoothing=smoothing, reduction=reduction)
        found.append((loss, head.weight.grad))
    (stock, gradient), (ours, own) = found
    if isinstance(stock, str) or isinstance(ours, str):
        assert stock == ours
        return
    assert ours.dtype == stock.dtype
    # Stock rounds to the dtypes of logits and loss, and smooths targets in their own dtype.
    eps = max(torch.finfo(each).eps for each in (dtype, stock.dtype, targets) if each.is_floating_point)
    torch.testing.assert_close(ours, stock, rtol=8 * eps, atol=8 * eps)
    assert own is not None
    assert gradient is not None
    assert own.dtype == gradient.dtype
    torch.testing.assert_close(own, gradient, rtol=0, atol=8 * eps * float(gradient.abs().max()))
