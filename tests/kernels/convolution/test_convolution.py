"""A convolution of ours is PyTorch's, to the bit, and its recomputed input is gone before its gradient is there."""

from __future__ import annotations

import random
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.kernels.convolution.function import Settings, convolution

FORMS = {
    "1d": ((2, 4, 20), (6, 4, 3), Settings((1,), (1,), (1,), 1), F.conv1d),
    "2d": ((2, 4, 9, 8), (6, 4, 3, 3), Settings((2, 1), (1, 0), (1, 2), 1), F.conv2d),
    "depthwise": ((2, 4, 9, 8), (4, 1, 3, 3), Settings((1, 1), (1, 1), (1, 1), 4), F.conv2d),
    "3d": ((2, 4, 5, 6, 7), (6, 4, 2, 2, 2), Settings((1, 1, 2), (0, 0, 1), (1, 1, 1), 1), F.conv3d),
}


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


@pytest.mark.parametrize("frozen", ["", "x", "weight", "bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_value_and_gradients_are_bitwise_pytorchs(form: str, dtype: torch.dtype, frozen: str) -> None:
    shape, of_weight, settings, stock = FORMS[form]
    given = {"x": draw(shape, dtype, 0), "weight": draw(of_weight, dtype, 1), "bias": draw(of_weight[:1], dtype, 2)}
    for name in given:
        given[name].requires_grad_(name != frozen)
    x, weight, bias = given["x"], given["weight"], None if frozen == "no bias" else given["bias"]
    expected, found = stock(x, weight, bias, *settings), convolution(x, weight, bias, settings)
    assert torch.equal(expected, found)
    wanted = [each for each in (x, weight, bias) if each is not None and each.requires_grad]
    dy = draw(tuple(expected.shape), dtype, 3).detach()
    pairs = zip(torch.autograd.grad(expected, wanted, dy), torch.autograd.grad(found, wanted, dy), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_it_can_be_differentiated_twice() -> None:
    shape, of_weight, settings, _ = FORMS["1d"]
    x, weight, bias = (draw(each, torch.float64, seed) for seed, each in enumerate((shape, of_weight, of_weight[:1])))
    assert torch.autograd.gradgradcheck(lambda *given: convolution(*given, settings), (x, weight, bias))


def test_its_input_is_gone_before_the_gradient_of_it_is_there() -> None:
    shape, of_weight, settings, _ = FORMS["2d"]
    made: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def recompute(kept: Tensor) -> Tensor:
        if kept.shape != torch.Size(shape):
            return kept
        value = kept.clone()
        made.append(weakref.ref(value))
        return value

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.ops.aten.convolution_backward.default and args[-1][0]:
                alive.append(made[-1]() is not None)
            return func(*args, **(kwargs or {}))

    x, weight = draw(shape, torch.float32, 0), draw(of_weight, torch.float32, 1)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, recompute):
        y = convolution(x, weight, None, settings)
    with Watch():
        y.sum().backward()
    assert alive == [False]


@pytest.mark.parametrize("seed", range(60))
def test_convolutions_of_any_form_are_bitwise_pytorchs_as_often_as_backward_runs(seed: int) -> None:
    pick = random.Random(seed)
    dims, groups, dtype = pick.choice([1, 2, 3]), pick.choice([1, 2, 3]), pick.choice([torch.float64, torch.float32])
    of_each = [(1, 2, 3), (1, 2, 3), (0, 1, 2), (1, 2)]  # kernel, stride, padding, dilation
    kernel, *rest = ([pick.choice(options) for _ in range(dims)] for options in of_each)
    shape = (pick.choice([1, 3]), 2 * groups, *(pick.choice([5, 7, 9]) for _ in range(dims)))
    x, weight, bias = (
        draw(each, dtype, number)
        for number, each in enumerate((shape, (groups * 2, 2, *kernel), (groups * 2,)))
    )  # fmt: skip
    stock = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    expected, found = stock(x, weight, bias, *rest, groups), convolution(x, weight, bias, Settings(*rest, groups))
    assert torch.equal(expected, found)
    dy = draw(tuple(expected.shape), dtype, 3).detach()
    if pick.random() < 0.5:
        dy = dy[..., :1].expand_as(dy)
    of_stock, *ours = (
        torch.autograd.grad(y, (x, weight, bias), dy, retain_graph=True) for y in (expected, found, found)
    )
    for gradients in ours:
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(gradients, of_stock, strict=True))
