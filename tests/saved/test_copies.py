"""Copies in another layout or dtype of tensors that are saved anyway, or can be recomputed, are handles too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memopt.kernels.norm.function import ms_norm
from memopt.kernels.norm.reference import NormSpec
from memopt.saved import RecomputeScope
from memopt.trace.account import live_bytes
from tests.saved.builders import WritesIntoWhatItKept

BATCH, HEADS, TOKENS, HEAD_DIM = 2, 3, 5, 8
WIDTH = HEADS * HEAD_DIM

MERGES: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose, contiguous, reshape": lambda y: y.transpose(1, 2).contiguous().reshape(BATCH, TOKENS, WIDTH),
    "transpose from behind, contiguous, view": lambda y: y.transpose(-3, -2).contiguous().view(BATCH, TOKENS, WIDTH),
    "transpose, reshape": lambda y: y.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH),
    "permute, flatten": lambda y: y.permute(0, 2, 1, 3).flatten(2),
    "negative permute, contiguous, flatten": lambda y: y.permute(0, -2, -3, -1).contiguous().flatten(2),
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


Program = Callable[[], Tensor]


def _agrees(run: Program, parameters: list[Tensor]) -> bool:
    """Whether gradients inside a scope are those outside, to the last bit."""
    expected = torch.autograd.grad(run(), parameters)
    with RecomputeScope():
        loss = run()
    return all(torch.equal(a, b) for a, b in zip(expected, torch.autograd.grad(loss, parameters), strict=True))


def _leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def _copies_in_two_layouts(a: Tensor, v: Tensor, w: Tensor) -> Tensor:
    x = a.t().sigmoid()
    return (x.contiguous() @ v).sum() + (x.clone() @ w).sin().sum()


def _casts_in_two_layouts(a: Tensor, v: Tensor, w: Tensor) -> Tensor:
    x = F.silu(a)
    return (x.double() * v).sum() + (x.to(torch.float64, memory_format=torch.channels_last) * w).sin().sum()


def _a_cast_and_the_tensor_itself(a: Tensor, v: Tensor, w: Tensor) -> Tensor:
    x = F.gelu(a)
    return (x * v).sum() + (x.double() * w).sum()


@pytest.mark.parametrize(
    ("read", "shape"),
    [(_copies_in_two_layouts, (6, 5)), (_casts_in_two_layouts, (2, 3, 4, 5)), (_a_cast_and_the_tensor_itself, (6, 5))],
)
def test_two_copies_of_one_tensor_are_two(read: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    leaves = _leaves(shape, shape, shape)
    assert _agrees(lambda: read(*leaves), leaves)


@pytest.mark.parametrize("copied", [torch.clone, lambda x: x.t().contiguous().t()])
def test_a_tensor_that_was_changed_behind_autograds_back_before_its_clone(copied: Callable[[Tensor], Tensor]) -> None:
    a, b, w = leaves = _leaves((6, 5), (6, 5), (5, 3))

    def run() -> Tensor:
        x = (a * 1) * (b * 1)
        with torch.no_grad():
            x.mul_(2)
        return (copied(x) @ w).sin().sum()

    assert _agrees(run, leaves)


def test_a_clone_that_a_function_may_write_into_is_its_own() -> None:
    leaves = _leaves((6, 5))
    assert _agrees(lambda: WritesIntoWhatItKept.apply(torch.sigmoid(leaves[0]).clone()).sum(), leaves)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_was_checkpointed_before_the_scope_is_read_as_it_is(use_reentrant: bool) -> None:
    a, w = leaves = _leaves((2, 3, 7, 8), (24, 3))
    stock = checkpoint(_attend, a, use_reentrant=use_reentrant).transpose(1, 2).reshape(2, 7, 24) @ w
    expected = _grad(stock, leaves)
    attended = checkpoint(_attend, a, use_reentrant=use_reentrant)
    with RecomputeScope():
        y = attended.transpose(1, 2).reshape(2, 7, 24) @ w
    assert all(torch.equal(one, other) for one, other in zip(expected, _grad(y, leaves), strict=True))


def _attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x * 1.0, x, x)


def _grad(y: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    for leaf in leaves:
        leaf.grad = None
    y.sum().backward()
    return [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]


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


class PreBackwardFunctionForModule(torch.autograd.Function):
    """As ZeRO-3 puts one behind each module: it returns its input."""

    @staticmethod
    def forward(outputs: Tensor) -> Tensor:
        return outputs.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_what_zero_3_puts_between_modules_is_looked_through() -> None:
    a, b, w = _leaves((64, 8), (64, 8), (8, 8))

    def run() -> Tensor:
        # The product would be saved by the linear behind it; its factors are.
        return F.linear(PreBackwardFunctionForModule.apply((a * 1.0) * (b * 1.0)), w).square().sum()

    assert _agrees(run, [a, b, w])

    def scoped() -> Tensor:
        with RecomputeScope():
            return run()

    assert live_bytes(run) - live_bytes(scoped) == 64 * 8 * 4


def _of_rows(a: Tensor, w: Tensor, *, changed: bool = False) -> Tensor:
    """A product in a wider dtype of rows of a norm's output, as routers of experts compute it."""
    x = ms_norm(a * 1, torch.full((4,), 0.5), None, NormSpec("rms", 1e-6), torch.float32)
    if changed:
        with torch.no_grad():
            x.mul_(2)
    return (x.view(-1, x.size(-1)).double() @ w).sin().sum()


def test_a_cast_of_a_view_is_not_kept() -> None:
    a, w = leaves = [*_leaves((2, 3, 4)), torch.ones(4, 5, dtype=torch.float64, requires_grad=True)]
    assert _agrees(lambda: _of_rows(a, w), leaves)

    def scoped() -> Tensor:
        with RecomputeScope():
            return _of_rows(a, w)

    assert live_bytes(lambda: _of_rows(a, w)) - live_bytes(scoped) == a.numel() * 8


def test_a_cast_of_a_view_that_was_changed_behind_autograds_back_is_kept() -> None:
    leaves = [*_leaves((2, 3, 4)), torch.ones(4, 5, dtype=torch.float64, requires_grad=True)]
    assert _agrees(lambda: _of_rows(*leaves, changed=True), leaves)
