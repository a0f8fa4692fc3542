"""The table of activations: values, gradients and nodes are PyTorch's, and every kind has its Triton functions."""

from __future__ import annotations

import ast
import importlib.resources
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memopt.torch_compat.activations import ACTIVATIONS, OPERATIONS, OTHER, Operation, kind_of_call, saves_its_output

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


def test_every_known_activation_has_a_definition_here():
    assert ACTIVATIONS.keys() == DEFINITIONS.keys()
    assert all(row.kind == kind for kind, row in ACTIVATIONS.items())


@pytest.mark.parametrize("function", ["value", "slope"])
def test_every_known_activation_has_its_triton_function(function):
    source = importlib.resources.files("memopt.kernels.activation").joinpath("scalar_triton.py").read_text()
    body = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == function)
    compared = [node for node in ast.walk(body) if isinstance(node, ast.Compare) and ast.unparse(node.left) == "KIND"]
    assert [ast.literal_eval(node.comparators[0]) for node in compared] == list(ACTIVATIONS)


@pytest.mark.parametrize("kind", [kind for kind, row in ACTIVATIONS.items() if row.slopes is not None])
def test_the_slope_has_the_limits_of_its_row(kind):
    far = torch.tensor([-1e4, 1e4], dtype=torch.float64)
    slopes = ACTIVATIONS[kind].gradient(torch.ones_like(far), far)
    torch.testing.assert_close(slopes, torch.tensor(ACTIVATIONS[kind].slopes, dtype=torch.float64), rtol=0, atol=1e-12)


def test_the_slope_of_a_row_without_limits_grows():
    without = [row for row in ACTIVATIONS.values() if row.slopes is None]
    assert [row.kind for row in without] == ["relu2"]
    z = torch.tensor([1e3, 1e4])
    assert without[0].gradient(torch.ones_like(z), z).diff() > 1e4


@pytest.mark.parametrize("kind", KINDS)
def test_the_slope_is_continuous_where_its_row_says_so(kind):
    # The kinks of all kinds are multiples of 1 / 2.
    kinks = torch.arange(-16, 17, dtype=torch.float64) / 2
    below, above = (ACTIVATIONS[kind].gradient(torch.ones_like(kinks), kinks + shift) for shift in (-1e-6, 1e-6))
    assert ((above - below).abs().max() < 1e-4) == ACTIVATIONS[kind].continuous


def call(operation: Operation) -> Tensor:
    """The output of a call of `operation` by its function, with its graph."""
    z = torch.linspace(-2, 2, 6, requires_grad=True)
    name = operation.functions[0] if operation.functions else "rrelu"
    arguments = {"prelu": (torch.full((1,), 0.3),), "rrelu": (0.1, 0.3, True)}.get(name, ())
    output: Tensor = getattr(F, name)(z * 1, *arguments)
    return output


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_the_node_of_an_operation_saves_what_its_row_says(operation):
    node = call(operation).grad_fn
    assert node.name() == operation.node
    assert hasattr(node, "_saved_result") == (operation.saves == "output")
    assert hasattr(node, "_saved_self") == (operation.saves == "input")


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_the_dispatcher_sees_an_operation_under_its_name(operation):
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func._schema.name.removeprefix("aten::"))
            return func(*args, **(kwargs or {}))

    with Mode():
        call(operation)
    assert operation.name in seen or operation.node == OPERATIONS[seen[-1]].node


@pytest.mark.parametrize("row", [row for row in ACTIVATIONS.values() if row.operation], ids=lambda row: row.kind)
def test_a_kind_is_computed_by_the_operation_of_its_row(row):
    z = torch.linspace(-2, 2, 6, requires_grad=True)
    assert row.value(z).grad_fn.name() == row.operation.node
    assert saves_its_output(row.kind) == (row.operation.saves == "output")


@pytest.mark.parametrize("kind", [kind for kind, row in ACTIVATIONS.items() if row.operation is None])
def test_a_kind_without_an_operation_takes_several(kind):
    node = ACTIVATIONS[kind].value(torch.linspace(-2, 2, 6, requires_grad=True) * 1).grad_fn
    assert node.name() not in {operation.node for operation in OPERATIONS.values()}
    assert not saves_its_output(kind)


def test_a_call_counts_as_the_kind_of_its_operation():
    assert kind_of_call("gelu", {}) == "gelu_erf"
    assert kind_of_call("gelu", {"approximate": "tanh"}) == "gelu_tanh"
    assert kind_of_call("hardtanh", {}) == OTHER
    assert kind_of_call("glu", {}) is None
    assert kind_of_call("mul", {}) is None


@pytest.mark.parametrize("kind", KINDS)
def test_value_is_that_of_the_definition(kind):
    torch.testing.assert_close(ACTIVATIONS[kind].value(points()), DEFINITIONS[kind](points()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_that_of_the_definition(kind):
    z = points().requires_grad_()
    dh = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (expected,) = torch.autograd.grad(DEFINITIONS[kind](z), z, dh)
    # PyTorch's hardsigmoid multiplies with an fp32 1/6.
    rtol = 3e-8 if kind == "hardsigmoid" else 1e-11
    torch.testing.assert_close(ACTIVATIONS[kind].gradient(dh, z.detach()), expected, rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_bitwise_autograds(kind, dtype):
    z = points(dtype).requires_grad_()
    dh = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    (expected,) = torch.autograd.grad(ACTIVATIONS[kind].value(z), z, dh)
    assert torch.equal(ACTIVATIONS[kind].gradient(dh, z.detach()), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_at_a_kink_is_autograds(kind):
    z = torch.tensor([-6.0, -3.0, -0.0, 0.0, 3.0, 6.0], requires_grad=True)
    dh = torch.arange(1.0, 7.0)
    (expected,) = torch.autograd.grad(ACTIVATIONS[kind].value(z), z, dh)
    assert torch.equal(ACTIVATIONS[kind].gradient(dh, z.detach()), expected)
