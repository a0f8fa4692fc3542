"""Norms of channels that an activation reads: the activation keeps none of the norm's output."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt.trace.account import account


class ChannelsFirst(nn.LayerNorm):
    """A layer norm over dimension 1, whose output is a view, as ConvNeXts have it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """A residual block of a diffusion model: one activation module for two norms."""

    def __init__(self, activation: nn.Module | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, 8), ChannelsFirst(8)
        self.conv1, self.conv2 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        act = F.silu if self.activation is None else self.activation
        h = self.conv1(act(self.norm1(x)))
        return x + self.conv2(act(self.norm2(h)))


ACTIVATIONS = {
    "silu": nn.SiLU(),
    "function": None,
    "gelu": nn.GELU(),
    "relu": nn.ReLU(),
    "silu in place": nn.SiLU(inplace=True),
    "relu in place": nn.ReLU(inplace=True),
}
X = torch.randn(2, 8, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def model(activation: str) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(*(Block(copy.deepcopy(ACTIVATIONS[activation])) for _ in range(3))).double().train()
    for parameter in made.parameters():
        nn.init.normal_(parameter, 0.3, 0.5)
    return made


def gradients(made: nn.Module) -> list[Tensor]:
    x = X.clone().requires_grad_()
    trained = [parameter for parameter in made.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad(made(x).square().sum(), [x, *trained]))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("frozen", [False, True])
def test_what_an_activation_reads_is_recomputed(activation: str, frozen: bool) -> None:
    """... also if the norm is frozen, as under LoRA."""
    stock = model(activation)
    for name, parameter in stock.named_parameters():
        parameter.requires_grad_(not (frozen and "norm" in name))
    patched = memopt.patch(copy.deepcopy(stock), inputs={"input": X})
    kept = [account(each, lambda each=each: each(X.clone().requires_grad_())).total for each in (stock, patched)]
    for ours, expected in zip(gradients(patched), gradients(stock), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    # Of x, norm1, act, conv1's output, norm2, act: x and conv1's output are left. ReLUs of stock save no input.
    assert kept[1] < (0.57 if "relu" in activation else 0.4) * kept[0]


def test_a_norm_that_nothing_else_saves_is_left() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(self.conv(x))

    plan = memopt.plan_for(nn.Sequential(Sum(), Sum()).double(), inputs={"input": X})
    reasons = {entry.reason for entry in plan.refusals if entry.kind == "norm"}
    assert reasons == {"it saves only its input, and no linear, convolution or activation saves its output"}


def test_norms_without_an_affine_and_norms_with_an_activation_run_again() -> None:
    """InstanceNorm without parameters, and a group norm that runs its ReLU in place."""

    class WithActivation(nn.GroupNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu_()

    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 8, 3), nn.InstanceNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 3), WithActivation(2, 8)]
    stock = nn.Sequential(*layers, nn.Conv2d(8, 8, 1)).double()
    patched = memopt.patch(copy.deepcopy(stock), inputs={"input": X})
    kept = [account(each, lambda each=each: each(X.clone().requires_grad_())).total for each in (stock, patched)]
    for ours, expected in zip(gradients(patched), gradients(stock), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    assert kept[1] < 0.65 * kept[0]  # the inputs of two convolutions and of two norms, and two more tensors
