"""Replayed modules keep what goes in, and lose no bit of value or gradient."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from memopt.kernels.replay.function import replayed
from memopt.saved import RecomputeScope


def gated_norm(inputs, parameters):
    x, gate = inputs
    (weight,) = parameters
    z = x.float() * F.silu(gate.float())
    return (weight * (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-6))).to(x.dtype)


def tensors(dtype=torch.bfloat16, **needs):
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (3, 8), "gate": (3, 8), "weight": (8,)}
    return [
        torch.randn(shape, generator=generator).to(dtype).requires_grad_(needs.get(name, True))
        for name, shape in shapes.items()
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", ["", "x", "gate", "weight"])
def test_value_and_gradients_are_bitwise_those_of_autograd(dtype, frozen):
    given = tensors(dtype, **({frozen: False} if frozen else {}))
    wanted = [tensor for tensor in given if tensor.requires_grad]
    dy = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    stock, ours = gated_norm(given[:2], given[2:]), replayed(gated_norm, given[:2], given[2:])
    assert torch.equal(stock, ours)
    for one, other in zip(torch.autograd.grad(stock, wanted, dy), torch.autograd.grad(ours, wanted, dy), strict=True):
        assert torch.equal(one, other)


def test_it_keeps_its_inputs_and_a_copy_of_its_parameters():
    *inputs, weight = tensors()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        replayed(gated_norm, inputs, [weight])
    assert [t.data_ptr() for t in kept[:2]] == [t.data_ptr() for t in inputs]
    assert len(kept) == 3
    assert torch.equal(kept[2], weight)
    assert kept[2].data_ptr() != weight.data_ptr()


def test_a_reader_keeps_a_handle_that_gives_the_same_gradients():
    *inputs, weight = tensors(torch.float32)
    matrix = torch.randn(8, 8, generator=torch.Generator().manual_seed(2)).requires_grad_()
    expected = torch.autograd.grad((gated_norm(inputs, [weight]) @ matrix).sum(), [*inputs, weight, matrix])
    with RecomputeScope():
        y = replayed(gated_norm, inputs, [weight])
        z = y @ matrix
    gone = weakref.ref(y)
    del y
    gc.collect()
    assert gone() is None
    for one, other in zip(expected, torch.autograd.grad(z.sum(), [*inputs, weight, matrix]), strict=True):
        assert torch.equal(one, other)


def test_a_double_backward_is_an_error():
    *inputs, weight = tensors()
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(replayed(gated_norm, inputs, [weight]).sum(), inputs, create_graph=True)


def test_backward_computes_in_the_dtypes_of_the_forward_under_autocast():
    x, _, _ = tensors(torch.float32)
    matrix = torch.eye(8)

    def through_a_linear(inputs, parameters):
        return F.linear(inputs[0], parameters[0]) * inputs[0]

    with torch.autocast("cpu", torch.bfloat16):
        stock = through_a_linear([x], [matrix])
        ours = replayed(through_a_linear, [x], [matrix])
    assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (stock, ours)))
