"""What a norm is compared with before it is patched, and the eps that it has in every dtype."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import memopt
from memopt.patches.norm.module import patch_norm
from memopt.patches.swap import is_swapped
from memopt.trace.account import live_bytes
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
    norm = LlamaRMSNorm(WIDTH, eps=1e-5).to(dtype)
    patch_norm(norm, site(1e-5), folded=False)
    assert is_swapped(norm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_with_another_eps_than_was_seen_is_not_patched(dtype):
    with pytest.raises(ValueError, match="does not compute the norm"):
        patch_norm(nn.RMSNorm(WIDTH, eps=1e-5).to(dtype), site(3e-6), folded=False)
    patch_norm(nn.RMSNorm(WIDTH, eps=1e-5).to(dtype), site(1e-5), folded=False)


MODELS = {
    "Olmo2": ("num_key_value_heads", 2),
    "Gemma3": ("head_dim", 16),
}


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_queries_and_keys_are_not_saved_behind_norms_that_round_after_their_weight(name, autocast, monkeypatch):
    """Two layers of two tensors (2 rows, 12 tokens, heads of 16 channels): the norm saves its input instead of x_hat,
    which takes as much, and what is rotated behind it is computed again."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 99}
    config = AutoConfig.for_model(name.lower() + "_text" * (name == "Gemma3"), num_hidden_layers=2, **sizes)
    config.intermediate_size, config.pad_token_id, config.eos_token_id = 128, 0, None
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter)) if parameter.dim() == 1 else None
    ids = torch.randint(1, 99, (2, 12))

    def step(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    saved, gradients = [], []
    for keeps_input in (False, True):
        patched = copy.deepcopy(stock)
        memopt.patch(patched, recipe="exact-unfolded")
        if not keeps_input:
            monkeypatch.setattr("memopt.kernels.norm.function._may_be_kept", lambda *given: False)
        step(patched).backward()
        patched.zero_grad()
        saved.append(live_bytes(lambda: step(patched)))  # noqa: B023 - called at once
        step(patched).backward()
        gradients.append([parameter.grad.double() for parameter in patched.parameters()])
        monkeypatch.undo()
    assert saved[0] - saved[1] == 2 * (2 * 12 * (4 + 2) * 16 * 2)
    step(stock).backward()
    for (before, after), parameter in zip(zip(*gradients, strict=True), stock.parameters(), strict=True):
        error = [(each - parameter.grad.double()).norm() for each in (before, after)]
        # x_hat is rounded no more: at most what two other orders of fp32's sums may round to 16 bits is added.
        assert error[1] <= error[0] + torch.finfo(torch.bfloat16).eps / 2 * parameter.grad.double().norm()


class Around(nn.Module):
    """A norm with a norm inside, as Moonshine's streaming encoder has it."""

    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.ln(x) * self.weight


def test_a_hook_on_a_norm_inside_of_a_patched_norm_runs():
    stock, x = Around(), torch.randn(3, WIDTH)
    patched = copy.deepcopy(stock)
    patch_norm(patched, replace(site(1e-5), kind="layer"), folded=False)
    for norm in (stock, patched):
        norm.ln.register_forward_hook(lambda _, given, y: y * 2)
    assert all(map(torch.equal, run(patched, x), run(stock, x)))


def test_a_norm_whose_input_is_changed_in_place_trains_as_before():
    torch.manual_seed(0)
    stock = InPlaceResidual().bfloat16()
    patched = memopt.patch(copy.deepcopy(stock), inputs={"x": torch.randn(4, 32).bfloat16()})
    x = torch.randn(4, 32).bfloat16()
    for model in (stock, patched):
        model(x).float().square().sum().backward()
    for ours, theirs in zip(patched.parameters(), stock.parameters(), strict=True):
        error = (ours.grad.double() - theirs.grad.double()).norm() / theirs.grad.double().norm()
        assert error <= 4 * torch.finfo(torch.bfloat16).eps


class InPlaceResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * 2
        y = self.norm(x).tanh()
        x += self.linear(y)
        return x
