"""A softmax that is recomputed loses no bit of value or gradient, and saves what its input is recomputed from."""

from __future__ import annotations

from operator import itemgetter

import pytest
import torch
from torch import Tensor

from memopt.kernels.softmax.function import recomputed_softmax
from memopt.saved import RecomputeScope

WIDENED = [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float64)]
SAME = [(dtype, dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def recomputed(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return recomputed_softmax(x, dim, dtype, itemgetter(0), [x.detach()])


@pytest.mark.parametrize("dim", [-1, 2, 1, 0])
@pytest.mark.parametrize("shape", [(3, 5, 7), (4, 300, 300)])  # the second one is computed in parts
@pytest.mark.parametrize(("narrow", "wide"), SAME + WIDENED)
def test_value_and_gradient_are_bitwise_those_of_autograd(
    narrow: torch.dtype, wide: torch.dtype, shape: tuple[int, ...], dim: int
) -> None:
    x = draw(*shape, dtype=narrow).requires_grad_()
    dy = draw(*shape, dtype=wide, seed=1)
    stock, ours = torch.softmax(x, dim, dtype=wide), recomputed(x, dim, wide)
    assert ours.dtype == wide
    assert torch.equal(stock, ours)
    assert torch.equal(*(torch.autograd.grad(y, x, dy)[0] for y in (stock, ours)))


@pytest.mark.parametrize(("narrow", "wide"), [*SAME, *WIDENED])
def test_a_reader_of_it_or_of_its_cast_saves_a_handle(narrow: torch.dtype, wide: torch.dtype) -> None:
    x, values = draw(2, 5, 7, dtype=narrow).requires_grad_(), draw(2, 7, 3, dtype=narrow, seed=1).requires_grad_()
    expected = torch.autograd.grad((torch.softmax(x, -1, dtype=wide).to(narrow) @ values).sum(), (x, values))
    calls = []

    def compute(read: list[Tensor]) -> Tensor:
        calls.append(0)
        return read[0]

    with RecomputeScope():
        y = recomputed_softmax(x, -1, wide, compute, [x.detach()])
        output = y.to(narrow) @ values
    found = torch.autograd.grad(output.sum(), (x, values))
    assert all(map(torch.equal, expected, found))
    assert len(calls) == 1  # for the product and for its own backward


def test_backward_twice_computes_it_twice_and_a_second_derivative_is_refused() -> None:
    x = draw(3, 4).requires_grad_()
    y = recomputed(x, -1, torch.float32)
    first, second = (torch.autograd.grad(y, x, y.detach(), retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


def test_backward_inside_an_autocast_region_is_the_same() -> None:
    x, dy = draw(3, 4, dtype=torch.bfloat16).requires_grad_(), draw(3, 4, seed=1)
    y = recomputed(x, -1, torch.float32)
    (expected,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(expected, found)


@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float32])
def test_gradients_for_many_outputs_at_once_are_those_of_one_after_another(wide: torch.dtype) -> None:
    x, dy = draw(300, 1000, dtype=torch.bfloat16).requires_grad_(), draw(2, 300, 1000, dtype=wide, seed=1)
    y = recomputed(x, -1, wide)
    (found,) = torch.autograd.grad(y, x, dy, is_grads_batched=True, retain_graph=True)
    inside = torch.func.vmap(lambda each: torch.autograd.grad(y, x, each, retain_graph=True)[0])(dy)
    for place, each in enumerate(dy):
        (expected,) = torch.autograd.grad(y, x, each, retain_graph=True)
        assert torch.equal(found[place], expected)
        assert torch.equal(inside[place], expected)
