"""Copies in another layout or dtype of what is kept anyway, or can be made again, are handles too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt.report.account import live_bytes
from memopt.saved import RecomputeScope

BATCH, HEADS, TOKENS, HEAD_DIM = 2, 3, 5, 8
WIDTH = HEADS * HEAD_DIM

MERGES: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose, contiguous, reshape": lambda y: y.transpose(1, 2).contiguous().reshape(BATCH, TOKENS, WIDTH),
    "transpose from behind, contiguous, view": lambda y: y.transpose(-3, -2).contiguous().view(BATCH, TOKENS, WIDTH),
    "transpose, reshape": lambda y: y.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH),
    "permute, flatten": lambda y: y.permute(0, 2, 1, 3).flatten(2),
    "negative permute, clone, flatten": lambda y: y.permute(0, -2, -3, -1).clone().flatten(2),
    "transpose, cast, reshape": lambda y: y.transpose(1, 2).double().reshape(BATCH, TOKENS, WIDTH).float() * 1.0,
}


def _attention(layout: Callable[[Tensor], Tensor]) -> Callable[[bool], tuple[Tensor, list[Tensor]]]:
    torch.manual_seed(0)
    inputs = [torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM, requires_grad=True) for _ in range(3)]
    out = nn.Linear(WIDTH, WIDTH)

    def run(scoped: bool) -> tuple[Tensor, list[Tensor]]:
        with RecomputeScope() if scoped else nullcontext():
            q, k, v = (tensor * 1.0 for tensor in inputs)
            return out(layout(F.scaled_dot_product_attention(q, k, v))), [*inputs, *out.parameters()]

    return run


@pytest.mark.parametrize("merge", MERGES.values(), ids=MERGES)
def test_gradients_of_attention_in_another_layout_are_stocks(merge: Callable[[Tensor], Tensor]) -> None:
    run = _attention(merge)
    expected, actual = (torch.autograd.grad(y.square().sum(), parameters) for y, parameters in (run(False), run(True)))
    for one, other in zip(expected, actual, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("merge", list(MERGES.values())[:5], ids=list(MERGES)[:5])
def test_the_copy_for_the_next_linear_is_not_kept(merge: Callable[[Tensor], Tensor]) -> None:
    run = _attention(merge)
    saved = live_bytes(lambda: run(False)[0]) - live_bytes(lambda: run(True)[0])
    assert saved == BATCH * TOKENS * WIDTH * 4


def test_attention_that_is_in_the_layout_already_is_kept_once() -> None:
    run = _attention(lambda y: y.flatten(1).unflatten(1, (TOKENS, WIDTH)))
    assert live_bytes(lambda: run(False)[0]) == live_bytes(lambda: run(True)[0])


def test_an_activation_that_is_transposed_and_copied_is_made_again() -> None:
    torch.manual_seed(0)
    x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
    weight = torch.randn(TOKENS, WIDTH, requires_grad=True)

    def run(scoped: bool) -> Tensor:
        with RecomputeScope() if scoped else nullcontext():
            return F.gelu(x * 2.0).transpose(1, 2).contiguous() @ weight

    assert live_bytes(lambda: run(True)) < live_bytes(lambda: run(False))
    expected, actual = (torch.autograd.grad(run(scoped).square().sum(), [x, weight]) for scoped in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))


def test_a_copy_that_is_changed_in_place_is_kept() -> None:
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def run(scoped: bool) -> Tensor:
        with RecomputeScope() if scoped else nullcontext():
            copied = F.gelu(x * 2.0).clone()
            copied.mul_(3.0)
            return copied @ weight

    expected, actual = (torch.autograd.grad(run(scoped).square().sum(), [x, weight]) for scoped in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))
