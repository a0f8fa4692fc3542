"""Whether a module is a linear, by its values and by what autocast does to it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt.walk.probes.linear import is_linear


class Written(nn.Linear):
    """Under autocast, the sum with a bias is in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.matmul(self.weight.T)
        return y if self.bias is None else y + self.bias


class LeavesAutocast(nn.Linear):
    """Computes in fp32, as some routers and heads do."""

    def __init__(self, device: str) -> None:
        super().__init__(4, 3)
        self.device = device

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device, enabled=False):
            return F.linear(x, self.weight, self.bias)


class ReturnsFloat(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(x.dtype)


def test_a_linear_that_is_written_out_is_one() -> None:
    assert is_linear(Written(4, 3, bias=False))


def test_a_subclass_is_one_whatever_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert is_linear(Written(4, 3, bias=False))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_linear_that_leaves_autocast_is_none(device: str) -> None:
    assert not is_linear(LeavesAutocast(device))
    assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize("kind", [ReturnsFloat, Written])
def test_a_linear_with_another_dtype_under_autocast_is_none(kind: type[nn.Linear]) -> None:
    assert not is_linear(kind(4, 3))
