"""Parts of a tensor that can be recomputed: rows that experts read, a slice that autocast casts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from memopt.recompute.versions import with_witness
from memopt.saved import RecomputeScope
from memopt.torch_compat import TorchDispatchMode

ROWS = torch.tensor([2, 0, 2, 1])
PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda y: y[ROWS],
    "rows of a view": lambda y: y.reshape(-1, 4)[ROWS],
    "cast rows": lambda y: y[ROWS].float(),
    "a cast slice": lambda y: y[1].float(),
    "a cast slice of the last dimension": lambda y: y.select(-1, -2).float(),
}


def gradient(part: Callable[[Tensor], Tensor], *, scope: bool, factor: float = 1.0) -> tuple[Tensor, bool | None]:
    """Of a factor behind `part` of an activation's output, and whether anything was replaced."""
    x = torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(3, 2, 4).requires_grad_()
    recomputes = RecomputeScope()
    if scope:
        recomputes.__enter__()
    y = with_witness(F.silu(x * 2))
    with torch.no_grad():
        if factor != 1:
            y.mul_(factor)
    read = part(y)
    weight = torch.ones_like(read, requires_grad=True)
    product = read * weight
    if scope:
        recomputes.__exit__(None, None, None)
    product.sum().backward()
    assert weight.grad is not None
    return weight.grad, recomputes.replaced


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_recomputed(name: str) -> None:
    ours, replaced = gradient(PARTS[name], scope=True)
    assert replaced
    assert torch.equal(ours, gradient(PARTS[name], scope=False)[0])


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_what_was_changed_in_place_is_saved(name: str) -> None:
    ours, replaced = gradient(PARTS[name], scope=True, factor=3)
    assert not replaced
    assert torch.equal(ours, gradient(PARTS[name], scope=False, factor=3)[0])


def test_rows_of_changed_rows_are_saved() -> None:
    def part(y: Tensor) -> Tensor:
        rows = y[ROWS]
        rows.detach().mul_(3)
        return rows.reshape(-1)[ROWS]

    assert torch.equal(gradient(part, scope=True)[0], gradient(part, scope=False)[0])


def test_the_whole_is_recomputed_once_for_all_its_parts() -> None:
    x = torch.linspace(-2, 2, 24).reshape(3, 8).requires_grad_()
    weights = [torch.ones(8, requires_grad=True) for _ in range(3)]
    with RecomputeScope():
        y = with_witness(F.silu(x * 2))
        out = sum((y[torch.tensor([i])] * weight).sum() for i, weight in enumerate(weights))
    calls: list[object] = []
    silu = torch.ops.aten.silu.default

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            calls.append(func)
            return func(*args, **(kwargs or {}))

    with Counting():
        out.backward()  # type: ignore[union-attr]
    assert calls.count(silu) == 1


def test_rows_that_a_checkpointed_part_read_are_left_to_it() -> None:
    """Checkpointing gives each of its tensors back once."""
    x = torch.linspace(-2, 2, 24).reshape(3, 8).requires_grad_()
    weight = torch.full((4, 8), 2.0, requires_grad=True)

    def read(y: Tensor) -> Tensor:
        return y[ROWS]

    with RecomputeScope():
        rows = checkpoint(read, with_witness(F.silu(x * 2)), use_reentrant=False)
        out = (rows * weight).sum()
    out.backward()
    assert torch.equal(weight.grad, F.silu(x * 2)[ROWS].detach())
