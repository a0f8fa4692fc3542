"""Composed activations keep their input only, and lose no bit of value or gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from memopt.kernels.activation import recomputed_activation


def gelu_new(z: Tensor) -> Tensor:
    return 0.5 * z * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * torch.pow(z, 3.0))))


def quick_gelu(z: Tensor) -> Tensor:
    return z * torch.sigmoid(1.702 * z)


@pytest.mark.parametrize("function", [gelu_new, quick_gelu])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_value_and_gradient_are_bitwise_those_of_autograd(function, dtype):
    z = torch.linspace(-8, 8, 1001, dtype=torch.float64).to(dtype).requires_grad_()
    dh = torch.randn(1001, generator=torch.Generator().manual_seed(0)).to(dtype)
    stock, ours = function(z), recomputed_activation(z, function)
    assert torch.equal(stock, ours)
    assert torch.equal(torch.autograd.grad(stock, z, dh)[0], torch.autograd.grad(ours, z, dh)[0])


def test_it_keeps_its_input_and_nothing_else():
    z = torch.randn(4, 8, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        recomputed_activation(z, gelu_new)
    assert len(kept) == 1
    assert kept[0].data_ptr() == z.data_ptr()


def test_a_double_backward_is_an_error():
    z = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(recomputed_activation(z, gelu_new).sum(), z, create_graph=True)


def test_backward_computes_in_the_dtypes_of_the_forward_under_autocast():
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    z = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))

    def through_a_linear(t: Tensor) -> Tensor:
        return torch.tanh(t) * torch.nn.functional.linear(t, torch.eye(8)).float()

    grads = []
    for function in (through_a_linear, lambda t: recomputed_activation(t, through_a_linear)):
        leaf = z.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            h = function(leaf)
        grads.append(torch.autograd.grad((h @ weight).sum(), leaf)[0])
    assert torch.equal(*grads)
