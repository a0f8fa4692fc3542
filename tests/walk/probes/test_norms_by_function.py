"""Norms that are known by their function alone: without a scale of channels, or with scalars in what is scaled."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt.walk.probes.probe import probe_norm
from tests.walk.probes.test_probe import WIDTH, AnyWidthRMS, probed


class UnitLength(nn.Module):
    """A norm as ``F.normalize``, whose eps limits the length; of all channels, or scaled by a scalar."""

    def __init__(self, scale: Tensor | None = None) -> None:
        super().__init__()
        self.scale = math.sqrt(WIDTH) if scale is None else nn.Parameter(scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.scale


class CentredByHand(nn.Module):
    """A layer norm whose eps is added to the deviation, with one scale for all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return self.g * x / (x.std(-1, keepdim=True) + 1e-5)


class ScalarRMS(AnyWidthRMS):
    """A norm with a formula, times a scalar that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.g


class DynamicTanh(nn.Module):
    """gamma * tanh(alpha * x) + beta, which takes the place of a norm (arXiv 2503.10622)."""

    def __init__(self, *, saturates: bool = True) -> None:
        super().__init__()
        self.alpha, self.saturates = nn.Parameter(torch.full((1,), 0.5)), saturates
        self.gamma, self.beta = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.alpha * x
        return self.gamma * (x.tanh() if self.saturates else x) + self.beta


def test_scale_and_shift_may_follow_any_function_with_scalars() -> None:
    probe = probed(DynamicTanh())
    assert (probe.kind, probe.weight, probe.bias, probe.by_rows) == ("other", "gamma", "beta", True)
    assert "normalises nothing" in str(probe_norm(DynamicTanh(saturates=False)))


class BufferOfShifts(nn.Module):
    """A layer norm whose bias is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("beta", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.gamma, self.beta)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_norm_with_a_bias_that_is_a_buffer_is_known(device: str) -> None:
    module = BufferOfShifts()
    module.beta += 1
    probe = probed(module.to(device))
    assert (probe.kind, probe.weight, probe.bias) == ("other", None, None)


class Sign(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sign()


@pytest.mark.parametrize(
    "module", [UnitLength(), UnitLength(torch.tensor(3.0)), UnitLength(torch.ones(1)), CentredByHand(), ScalarRMS()]
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_norm_without_a_scale_of_channels_runs_again(module: nn.Module, device: str) -> None:
    probe = probed(copy.deepcopy(module).to(device))
    assert not probe.has_formula
    assert (probe.hidden_size, probe.weight, probe.intermediates) == (0, None, True)


@pytest.mark.parametrize("module", [nn.Softmax(1), nn.Softmax(-1), nn.Tanh(), Sign()])
def test_what_does_not_normalise_its_rows_is_no_norm(module: nn.Module) -> None:
    assert probe_norm(module) is None


class DoubledWithGradients(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * (2 if torch.is_grad_enabled() else 1)


def test_what_is_another_function_with_gradients_cannot_run_again() -> None:
    assert "cannot be run again" in str(probe_norm(DoubledWithGradients()))


class LearnedEps(nn.Module):
    """A norm whose eps is trained, as in filter response norms."""

    def __init__(self, *, has_weight: bool) -> None:
        super().__init__()
        self.eps = nn.Parameter(torch.full((1,), 1e-2))
        self.weight = nn.Parameter(torch.ones(WIDTH)) if has_weight else None

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps.abs())
        return y if self.weight is None else y * self.weight


def test_a_norm_whose_eps_is_trained_has_no_formula() -> None:
    assert probe_norm(LearnedEps(has_weight=False)) is None
    assert probed(LearnedEps(has_weight=True)).kind == "other"
