"""Composed activations keep their input only, and lose no bit of value or gradient."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from memopt.kernels.activation.function import activation, activation_backward, recomputed_activation
from memopt.torch_compat.activations import ACTIVATIONS


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


@pytest.mark.parametrize("kind", ["gelu_tanh", None])
def test_without_triton_a_known_kind_is_bitwise_the_stock_function_too(kind):
    z = torch.randn(64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    stock, ours = gelu_new(z), recomputed_activation(z, gelu_new, kind)
    assert torch.equal(stock, ours)
    assert torch.equal(*(torch.autograd.grad(h.sum(), z)[0] for h in (stock, ours)))


@pytest.mark.parametrize("kind", ["gelu_tanh", None])
def test_under_autocast_the_output_has_the_stock_dtype(kind):
    def in_fp32(z: Tensor) -> Tensor:
        return gelu_new(z.float())

    z = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    for function in (gelu_new, in_fp32):
        with torch.autocast("cpu", torch.bfloat16):
            stock, ours = function(z), recomputed_activation(z, function, kind)
        assert stock.dtype == ours.dtype
        assert torch.equal(stock, ours)


def test_a_second_backward_of_a_retained_graph_gives_the_same_and_the_gradient_is_not_written_to():
    z, dh = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    before = dh.clone()
    h = recomputed_activation(z, gelu_new)
    first, second = (torch.autograd.grad(h, z, dh, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(dh, before)


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_checkpointing_the_gradient_is_the_same(reentrant):
    z = torch.randn(4, 8, requires_grad=True)
    plain = torch.autograd.grad(gelu_new(z).sum(), z)[0]
    h = checkpoint(lambda t: recomputed_activation(t, gelu_new, "gelu_tanh"), z, use_reentrant=reentrant)
    h.sum().backward()
    assert torch.equal(plain, z.grad)


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_tensors_without_memory_pass_through_in_both_directions(device):
    with FakeTensorMode() if device == "fake" else nullcontext():
        z = torch.empty(3, 4, device="cpu" if device == "fake" else device, dtype=torch.bfloat16, requires_grad=True)
        h = recomputed_activation(z, gelu_new, "gelu_tanh")
        (dz,) = torch.autograd.grad(h.sum(), z)
    assert (h.shape, h.dtype) == (dz.shape, dz.dtype) == (z.shape, z.dtype)


OPERATORS = {
    "contiguous": lambda: torch.randn(3, 8),
    "transposed": lambda: torch.randn(8, 3).t(),
    "with gaps": lambda: torch.randn(3, 8)[:, ::2],
    "bf16": lambda: torch.randn(5).bfloat16(),
    "empty": lambda: torch.randn(0, 4),
}


@pytest.mark.parametrize("kind", ["quick_gelu", "silu"])
@pytest.mark.parametrize("layout", OPERATORS)
def test_the_operators_keep_the_promises_of_their_fake_kernels(layout, kind):
    z = OPERATORS[layout]()
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    opcheck(activation, (z.requires_grad_(), kind), test_utils=checks)
    opcheck(activation_backward, (torch.ones_like(z), z.detach(), kind), test_utils=checks)
    opcheck(activation_backward, (torch.ones(()).expand(z.shape), z.detach(), kind), test_utils=checks)


@pytest.mark.parametrize("kind", sorted(ACTIVATIONS))
def test_the_operators_gradient_is_right_in_fp64(kind):
    z = torch.linspace(-7.3, 7.1, 40, dtype=torch.float64).requires_grad_()
    assert gradcheck(lambda t: activation(t, kind), (z,))


def test_the_operator_has_no_silent_second_derivative():
    z = torch.randn(4, requires_grad=True)
    (dz,) = torch.autograd.grad(activation(z, "silu").sum(), z, create_graph=True)
    with pytest.raises(RuntimeError, match="autograd"):
        torch.autograd.grad(dz.sum(), z)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", ["gelu_tanh", None])
def test_it_compiles_into_one_graph(kind, dynamic):
    torch.compiler.reset()

    def function(z: Tensor) -> Tensor:
        return recomputed_activation(2 * z, gelu_new, kind)

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (3, 5):
        z = torch.randn(rows, 8, requires_grad=True)
        stock, ours = gelu_new(2 * z), compiled(z)
        torch.testing.assert_close(ours, stock)
        torch.testing.assert_close(*(torch.autograd.grad(h.sum(), z)[0] for h in (ours, stock)))


def test_batched_gradients_of_a_tensor_that_is_computed_in_parts():
    z = torch.randn(16, 2**15, requires_grad=True)
    directions = torch.randn(2, *z.shape)
    h = recomputed_activation(z, torch.nn.functional.mish)
    (found,) = torch.autograd.grad(h, z, directions, is_grads_batched=True)
    (expected,) = torch.autograd.grad(torch.nn.functional.mish(z), z, directions, is_grads_batched=True)
    torch.testing.assert_close(found, expected)
