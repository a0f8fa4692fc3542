"""What a norm is compared with before it is patched, and the eps that it has in every dtype."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from memopt.patches.norm.module import patch_norm
from memopt.walk.probes.probe import NormProbe, probe_norm
from memopt.walk.sites import NormSite

WIDTH = 24
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def site(eps: float | None) -> NormSite:
    return NormSite(name="", kind="rms", hidden_size=WIDTH, eps=eps, weight="weight")


def run(norm: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, and gradients of its sum of squares."""
    x = x.clone().requires_grad_()
    y = norm(x)
    return [y.detach(), *torch.autograd.grad(y.double().square().sum(), (x, *norm.parameters()))]


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_without_an_eps_has_the_machine_epsilon_that_torch_takes(dtype, autocast):
    stock = nn.RMSNorm(WIDTH)
    probe = probe_norm(stock)
    assert isinstance(probe, NormProbe)
    nn.init.uniform_(stock.weight, 0.5, 1.5)
    stock.to(dtype)
    patched = copy.deepcopy(stock)
    patch_norm(patched, site(probe.eps), folded=False)
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(8, WIDTH, generator=generator, dtype=torch.float64) * 1e-4).to(dtype)
    with torch.autocast("cpu", enabled=autocast):
        expected, actual = run(stock, x), run(patched, x)
    kept = torch.bfloat16 if autocast and dtype == torch.float32 else dtype
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == theirs.dtype
        error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        # The saved x_hat, y and what is summed are rounded on both sides; the wrong epsilon moves them by 70 %.
        assert error <= 8 * torch.finfo(kept).eps


def test_a_norm_whose_eps_follows_its_input_into_16_bit_has_no_formula():
    class OwnEpsilon(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            wide = x.float()
            return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps(x))).to(x.dtype)

        def eps(self, x: Tensor) -> float:
            return torch.finfo(x.dtype).eps

    class Fp64Epsilon(OwnEpsilon):
        def eps(self, x: Tensor) -> float:
            return torch.finfo(torch.float64).eps

    own, constant = probe_norm(OwnEpsilon()), probe_norm(Fp64Epsilon())
    assert isinstance(own, NormProbe)
    assert isinstance(constant, NormProbe)
    assert own.kind == "other"
    assert (constant.kind, constant.eps) == ("rms", torch.finfo(torch.float64).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_that_computes_in_fp32_is_patched_in_every_dtype(dtype):
    patch_norm(LlamaRMSNorm(WIDTH, eps=1e-5).to(dtype), site(1e-5), folded=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_with_another_eps_than_was_seen_is_not_patched(dtype):
    with pytest.raises(ValueError, match="does not compute the norm"):
        patch_norm(nn.RMSNorm(WIDTH, eps=1e-5).to(dtype), site(3e-6), folded=False)
    patch_norm(nn.RMSNorm(WIDTH, eps=1e-5).to(dtype), site(1e-5), folded=False)
