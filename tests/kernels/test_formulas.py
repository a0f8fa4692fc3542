"""The known activations mean what their names say, and their gradients are autograd's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from memopt.kernels.activation.formulas import ACTIVATIONS, GRADIENTS
from memopt.walk.probes import elementwise

KINDS = sorted(ACTIVATIONS)


def sigmoid(z: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-z))


def softplus(z: Tensor) -> Tensor:
    return torch.log1p(torch.exp(z))


def ramp(z: Tensor, top: float) -> Tensor:
    return torch.clamp(z, 0, top)


#: The definitions, from the papers that introduced them, in operations that PyTorch's own activations do not use.
DEFINITIONS = {
    "gelu_erf": lambda z: z * (1 + torch.erf(z / math.sqrt(2))) / 2,
    "gelu_tanh": lambda z: z * sigmoid(2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)),
    "quick_gelu": lambda z: z * sigmoid(1.702 * z),
    "silu": lambda z: z * sigmoid(z),
    "relu": lambda z: ramp(z, math.inf),
    "relu2": lambda z: ramp(z, math.inf) ** 2,
    "relu6": lambda z: ramp(z, 6),
    "leaky_relu": lambda z: torch.where(z > 0, z, z / 100),
    "elu": lambda z: torch.where(z > 0, z, torch.exp(z) - 1),
    "tanh": lambda z: 2 * sigmoid(2 * z) - 1,
    "sigmoid": sigmoid,
    "hardsigmoid": lambda z: ramp(z + 3, 6) / 6,
    "hardswish": lambda z: z * ramp(z + 3, 6) / 6,
    "mish": lambda z: z * (2 * sigmoid(2 * softplus(z)) - 1),
    "softplus": softplus,
}


def points(dtype: torch.dtype = torch.float64) -> Tensor:
    """Between -12 and 12, kinks not among them."""
    return torch.linspace(-12, 12, 1000, dtype=torch.float64).to(dtype)


def test_every_known_activation_has_a_gradient_and_a_definition_here():
    assert ACTIVATIONS.keys() == GRADIENTS.keys() == DEFINITIONS.keys()


def test_models_are_probed_with_the_functions_that_the_kernels_compute():
    assert elementwise.ACTIVATIONS is ACTIVATIONS


@pytest.mark.parametrize("kind", KINDS)
def test_value_is_that_of_the_definition(kind):
    torch.testing.assert_close(ACTIVATIONS[kind](points()), DEFINITIONS[kind](points()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_that_of_the_definition(kind):
    z = points().requires_grad_()
    dh = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (expected,) = torch.autograd.grad(DEFINITIONS[kind](z), z, dh)
    # PyTorch's hardsigmoid multiplies with an fp32 1/6.
    rtol = 3e-8 if kind == "hardsigmoid" else 1e-11
    torch.testing.assert_close(GRADIENTS[kind](dh, z.detach()), expected, rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_bitwise_autograds(kind, dtype):
    z = points(dtype).requires_grad_()
    dh = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    (expected,) = torch.autograd.grad(ACTIVATIONS[kind](z), z, dh)
    assert torch.equal(GRADIENTS[kind](dh, z.detach()), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_at_a_kink_is_autograds(kind):
    z = torch.tensor([-6.0, -3.0, -0.0, 0.0, 3.0, 6.0], requires_grad=True)
    dh = torch.arange(1.0, 7.0)
    (expected,) = torch.autograd.grad(ACTIVATIONS[kind](z), z, dh)
    assert torch.equal(GRADIENTS[kind](dh, z.detach()), expected)
