"""Dropped-out copies of tensors that are saved anyway, or can be recomputed, are handles of source and seed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memopt.kernels.dropout.function import seeded_dropout
from memopt.kernels.norm.function import NormSpec, ms_norm
from memopt.saved import RecomputeScope
from memopt.trace.account import live_bytes
from tests.support.compare import all_equal, gradients_of_squares

ROWS, WIDTH = 12, 40
P, SEED = 0.3, 5


def drop(x: Tensor, seed: int = SEED) -> Tensor:
    return seeded_dropout(x, P, seed)


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def norm(x: Tensor) -> Tensor:
    return ms_norm(x, torch.ones(WIDTH), None, NormSpec("rms", 1e-6), x.dtype)


def attended(x: Tensor) -> Tensor:
    q = x.view(2, 2, ROWS // 2, WIDTH // 2)
    return F.scaled_dot_product_attention(q * 1, q * 1, q * 1).transpose(1, 2).reshape(ROWS, WIDTH)


#: What a matmul reads.
READS: dict[str, Callable[[Tensor], Tensor]] = {
    "activation": lambda x: drop(F.silu(x)),
    "product": lambda x: drop(F.silu(x) * x.sin()),
    "norm": lambda x: drop(norm(x)),
    "norm, cast to fp32 first": lambda x: drop(norm(x).double()).float(),
    "cast afterwards": lambda x: drop(F.gelu(x)).double().float(),
    "two dropouts": lambda x: drop(drop(F.gelu(x)), seed=6),
    "softmax": lambda x: drop(x.softmax(-1)),
    "softmax, cast": lambda x: drop(x.double().softmax(-1).float()),
    "ReLU": lambda x: drop(F.relu(x)),
    "attention in another layout": lambda x: drop(attended(x)),
}


def program(read: Callable[[Tensor], Tensor]) -> tuple[Callable[[], Tensor], list[Tensor]]:
    x, w = both = leaves((ROWS, WIDTH), (WIDTH, 7))
    return lambda: read(x * 1) @ w, both


def run_in(scope: bool, run: Callable[[], Tensor]) -> Tensor:
    with RecomputeScope() if scope else nullcontext():
        return run()


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_gradients_are_those_of_what_is_kept(read: Callable[[Tensor], Tensor]) -> None:
    run, inputs = program(read)
    kept, recomputed = (gradients_of_squares(run_in(scope, run), inputs) for scope in (False, True))
    assert all_equal(kept, recomputed)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_the_matmul_reads_is_not_kept(read: Callable[[Tensor], Tensor]) -> None:
    run, (x, _) = program(read)
    without = live_bytes(lambda: run_in(True, lambda: read(x * 1)).sum())
    assert live_bytes(lambda: run_in(False, run)) >= without + ROWS * WIDTH * 4
    assert live_bytes(lambda: run_in(True, run)) <= without + ROWS * 7 * 4


def test_readers_with_masks_of_their_own_get_them() -> None:
    x, *ws = inputs = leaves((ROWS, WIDTH), (WIDTH, 7), (WIDTH, 7), (WIDTH, 7), (WIDTH, 7))

    def run() -> Tensor:
        h = norm(x * 1)
        reads = (h, drop(h, 1), drop(h, 2), drop(h, 1))
        return sum((read @ w).sin() for read, w in zip(reads, ws, strict=True))

    assert all_equal(*(gradients_of_squares(run_in(scope, run), inputs) for scope in (False, True)))


@pytest.mark.parametrize("change", [lambda h: h.mul_(2), lambda h: h[:3].zero_(), lambda h: h.detach().neg_()])
@pytest.mark.parametrize("make", [lambda x: norm(x * 1), lambda x: (x * 1) * x.sin()])
def test_what_was_changed_behind_autograds_back_before_it_was_dropped_out_is_kept(
    make: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor]
) -> None:
    x, w = inputs = leaves((ROWS, WIDTH), (WIDTH, 7))

    def run() -> Tensor:
        h = make(x)
        with torch.no_grad():
            change(h)
        return drop(h) @ w

    assert all_equal(*(gradients_of_squares(run_in(scope, run), inputs) for scope in (False, True)))


def test_a_copy_of_a_copy_is_kept_since_nothing_tells_whether_the_first_was_changed() -> None:
    def read(x: Tensor) -> Tensor:
        first = x.softmax(-1).clone()
        with torch.no_grad():
            first.mul_(2)
        return drop(first.clone())

    run, inputs = program(read)
    assert all_equal(*(gradients_of_squares(run_in(scope, run), inputs) for scope in (False, True)))


def test_what_is_changed_after_it_was_dropped_out_does_not_matter() -> None:
    def read(x: Tensor) -> Tensor:
        h = norm(x)
        y = drop(h)
        with torch.no_grad():
            h.mul_(2)
        return y

    run, inputs = program(read)
    assert all_equal(*(gradients_of_squares(run_in(scope, run), inputs) for scope in (False, True)))


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("copied", [lambda y: y, torch.clone])
def test_a_dropped_out_copy_that_is_changed_is_kept(copied: Callable[[Tensor], Tensor], recorded: bool) -> None:
    def read(x: Tensor) -> Tensor:
        y = drop(norm(x))
        with torch.set_grad_enabled(recorded):
            y.mul_(2)
        return copied(y)

    run, inputs = program(read)
    assert all_equal(*(gradients_of_squares(run_in(scope, run), inputs) for scope in (False, True)))


def test_a_retained_graph_can_be_walked_twice() -> None:
    run, inputs = program(READS["norm"])
    y = run_in(True, run)
    first, second = (gradients_of_squares(y, inputs, retain_graph=True) for _ in range(2))
    assert all_equal(first, second)
    assert all_equal(first, gradients_of_squares(run_in(False, run), inputs))


class Adapted(nn.Module):
    """A norm whose output two adapters read, each through a dropout of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.readers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with RecomputeScope():
            h = norm(x * 1)
            return sum((reader(drop(h, seed)) for seed, reader in enumerate(self.readers)), start=x)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_around_a_scope_gives_the_same_gradients(use_reentrant: bool) -> None:
    module, (x,) = Adapted(), leaves((ROWS, WIDTH))
    collected = []
    for wrapped in (False, True):
        module.zero_grad()
        x.grad = None
        y = checkpoint(module, x, use_reentrant=use_reentrant) if wrapped else module(x)
        y.square().sum().backward()
        collected.append((x.grad, *(parameter.grad for parameter in module.parameters())))
    assert all_equal(*collected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_under_autocast_the_cast_of_a_dropped_out_copy_is_recomputed(dtype: torch.dtype) -> None:
    x, w = inputs = leaves((ROWS, WIDTH), (WIDTH, 7))

    def run() -> Tensor:
        with torch.autocast("cpu", dtype):
            return drop(F.gelu(x * 1)) @ w

    assert all_equal(*(gradients_of_squares(run_in(scope, run).float(), inputs) for scope in (False, True)))
    without = live_bytes(lambda: run_in(True, lambda: drop(F.gelu(x * 1)).sum()))
    weights = w.numel() * 2
    assert live_bytes(lambda: run_in(True, run)) <= without + weights + ROWS * 7 * 2
