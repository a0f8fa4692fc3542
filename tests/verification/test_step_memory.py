"""The bytes of a step: gradients of parameters are not counted, whatever else is alive at the peak is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from memopt.verification.step_memory import lived

_ROWS, _WIDTH, _OUT = 64, 512, 8


class _Product(torch.autograd.Function):
    """`x @ weight.T`; in backward a temporary of `x` lives beside the gradient of `x` and, if first, of `weight`."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, weight_first: bool, copies: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight_first, ctx.copies = weight_first, copies
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_weight = gradient.T @ x if ctx.weight_first else None
        copies = [x.clone() for _ in range(2 + ctx.copies)]
        of_x = gradient @ weight
        del copies
        return of_x, gradient.T @ x if of_weight is None else of_weight, None, None


class _Model(nn.Module):
    def __init__(self, weight_first: bool, copies: int) -> None:
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.randn(_WIDTH)), nn.Parameter(torch.randn(_OUT, _WIDTH))
        self.settings = weight_first, copies

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(self.scale * x, self.weight, *self.settings)


def _peak(weight_first: bool, copies: int = 0) -> int:
    torch.manual_seed(0)
    return lived(_Model(weight_first, copies), {"x": torch.randn(_ROWS, _WIDTH)}).peak


def test_a_gradient_that_is_computed_earlier_does_not_count():
    assert _peak(weight_first=True) == _peak(weight_first=False)


@pytest.mark.parametrize("weight_first", [False, True])
def test_what_backward_holds_for_a_moment_counts(weight_first):
    assert _peak(weight_first, copies=2) - _peak(weight_first) == 2 * 4 * _ROWS * _WIDTH
