"""The norms' public function and operators, which must take the kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from memopt.kernels.base.device import runs_triton
from memopt.kernels.norm import forward_triton as norm_triton
from memopt.kernels.norm import ops as norm_ops
from memopt.kernels.norm.forward_triton import launch_affine, launch_backward, launch_forward
from memopt.kernels.norm.function import (
    NormSpec,
    affine,
    ms_norm,
    normalize,
)
from memopt.saved import RecomputeScope
from tests.kernels.norm.test_norm import FAMILIES
from tests.triton.conftest import DEVICE
from tests.triton.norms import (
    DTYPES,
    LAYER,
    RMS,
    double,
    draw,
    fused,
    parameters,
)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The launchers that ran."""
    ran: list[str] = []

    def recorded(launcher: Callable[..., object]) -> Callable[..., object]:
        def launch(*args: object) -> object:
            ran.append(launcher.__name__)
            return launcher(*args)

        return launch

    for launcher in (launch_forward, launch_affine, launch_backward):
        monkeypatch.setattr(norm_triton, launcher.__name__, recorded(launcher))
    return ran


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_public_function_is_as_exact_as_autograd(family, dtype, launches):
    weight, bias, spec = parameters(family, 72, dtype, "before")
    x = draw(64, 72, dtype=dtype, scale=2, shift=0.5)
    dy = draw(64, 72, dtype=dtype, seed=3)

    def plain(*tensors: Tensor | None) -> Tensor:
        return affine(normalize(tensors[0], spec)[0], *tensors[1:], spec, tensors[0].dtype, tensors[0].dtype)

    def run(function, *tensors):
        leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
        y = function(*leaves)
        return [y.detach(), *torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], dy.to(y.dtype))]

    truth = run(plain, *double(x, weight, bias))
    stock = run(plain, x, weight, bias)
    ours = run(lambda *t: ms_norm(*t, spec, dtype), x, weight, bias)
    assert launches == ["launch_forward", "launch_backward"]
    for exact, reference, candidate in zip(truth, stock, ours, strict=True):
        error = (candidate.double() - exact).square().mean().sqrt()
        # x_hat is rounded once before backward reads it: one rounding beside those that the reference makes.
        rounding = torch.finfo(dtype).eps / 2 * exact.square().mean().sqrt()
        assert error <= 1.25 * (reference.double() - exact).square().mean().sqrt() + rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", [LAYER, ("rms", 0, False, False)], ids=str)
def test_the_norm_of_a_sum_takes_one_kernel_each_way_and_no_addition(family, dtype, launches):
    weight, bias, spec = parameters(family, 72, dtype)
    a, b = (draw(16, 72, dtype=dtype, seed=seed).requires_grad_() for seed in (0, 7))
    dy = draw(16, 72, dtype=dtype, seed=3)
    with torch.profiler.profile() as profile:
        y = ms_norm(a, weight, bias, spec, dtype, residual=b)
    assert not [event.key for event in profile.key_averages() if event.key.startswith("aten::add")]
    given = torch.autograd.grad(y, [a, b], dy)
    assert launches == ["launch_forward", "launch_backward"]
    total = (a + b).detach().requires_grad_()
    expected = ms_norm(total, weight, bias, spec, dtype)
    assert torch.equal(y, expected)
    (dx,) = torch.autograd.grad(expected, total, dy)
    assert torch.equal(given[0], dx)
    assert torch.equal(given[1], dx)


def test_the_output_is_recomputed_by_the_kernel(launches):
    weight, bias, spec = parameters(LAYER, 72, torch.bfloat16, "before")
    x, other = draw(4, 72, dtype=torch.bfloat16).requires_grad_(), draw(4, 72, dtype=torch.bfloat16)
    other.requires_grad_()
    with RecomputeScope():
        y = ms_norm(x, weight, bias, spec, x.dtype)
        z = y * other
    (given,) = torch.autograd.grad(z.sum(), other)
    assert launches == ["launch_forward", "launch_affine"]
    assert torch.equal(given, y.detach())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_an_eps_it_is_the_machine_epsilon_of_fp32(dtype):
    x = draw(4, 24, dtype=dtype, scale=1e-4)
    _, x_hat, _ = launch_forward(x, None, None, NormSpec("rms", None).in_dtype(dtype))
    expected = torch.nn.functional.rms_norm(x, (24,))
    assert (x_hat.double() - expected.double()).norm() <= 2 * torch.finfo(dtype).eps * expected.double().norm()


@pytest.mark.parametrize("family", [RMS, LAYER, ("rms", 0, False, False)], ids=str)
def test_the_operators_are_consistent_with_their_fakes(family, launches):
    weight, bias, spec = parameters(family, 24, torch.float32)
    weight = None if weight is None else weight.requires_grad_()
    for x in (fused(torch.float32)[0].transpose(0, 1), draw(24, 5, dtype=torch.float32).t()):
        x.requires_grad_()
        checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
        arguments = (x, weight, bias, spec.kind, spec.eps, spec.offset, spec.cast, x.dtype, x.dtype)
        torch.library.opcheck(norm_ops.ms_norm, arguments, test_utils=checks)
        residual = torch.randn(x.shape, device=DEVICE).requires_grad_()
        torch.library.opcheck(norm_ops.ms_norm, (*arguments, residual), test_utils=checks)
    assert {"launch_forward", "launch_backward"} <= set(launches)


def test_what_the_kernels_do_not_take_goes_to_the_reference(launches):
    x = draw(4, 24, dtype=torch.float64)
    assert not runs_triton(x)
    ms_norm(x, None, None, NormSpec("rms", 1e-5), x.dtype)
    assert launches == []
