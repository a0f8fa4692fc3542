"""Padded and cloned copies of recomputable tensors are handles if nothing can have changed the copied tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt.recompute.versions import is_unchanged, with_witness
from memopt.saved import RecomputeScope
from memopt.trace.account import live_bytes

SHAPE = (2, 3, 6, 7)
PADS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda y: F.pad(y, (1, 2, 0, 1)),
    "none": lambda y: F.pad(y, (0, 0, 0, 0)),
    "after only": lambda y: F.pad(y, (0, 3)),
    "constant": lambda y: F.pad(y, (1, 1, 1, 1), value=-0.7),
    "cut": lambda y: F.pad(y, (-1, -2, -1, 0)),
    "cut here, grown there": lambda y: F.pad(y, (-1, 2, 1, -3), value=2.5),
    "channels": lambda y: F.pad(y, (0, 0, 0, 0, 1, 2), value=0.1),
    "reflect": lambda y: F.pad(y, (1, 2, 3, 0), mode="reflect"),
    "reflect, cut": lambda y: F.pad(y, (-1, 2, 3, 0), mode="reflect"),
    "replicate": lambda y: F.pad(y, (1, 2, 0, 1), mode="replicate"),
    "of rows": lambda y: F.pad(y.flatten(2), (4, 1), mode="reflect"),
    "transposed, then padded": lambda y: F.pad(y.transpose(1, 3), (1, 2)),
    "a part of the padded": lambda y: F.pad(y, (1, 2, 1, 1))[..., 2:-1],
    "clone": lambda y: y.clone(),
    "other layout": lambda y: y.contiguous(memory_format=torch.channels_last),
}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu6": F.relu6, "silu": F.silu, "relu": torch.relu}
Program = Callable[[], Tensor]


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def scoped(program: Program) -> Tensor:
    with RecomputeScope():
        return program()


def agrees(program: Program, *leaves: Tensor) -> bool:
    expected = torch.autograd.grad(program().square().sum(), leaves)
    actual = torch.autograd.grad(scoped(program).square().sum(), leaves)
    return all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))


@pytest.mark.parametrize("pad", PADS.values(), ids=PADS)
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_gradients_are_stocks_and_the_copy_is_not_kept(
    activation: Callable[[Tensor], Tensor], pad: Callable[[Tensor], Tensor]
) -> None:
    x = leaf(*SHAPE)
    weight = torch.randn_like(pad(x)).requires_grad_()

    def run() -> Tensor:
        return pad(with_witness(activation(x * 2))) * weight

    assert agrees(run, x, weight)
    assert live_bytes(run) - live_bytes(lambda: scoped(run)) >= pad(x).numel() * 4 - 4


def _two_borders_of_one_tensor(x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    y = with_witness(F.silu(x))
    return F.pad(y, (1, 1), value=1.0) * u + F.pad(y, (1, 1), value=2.0) * v


def _two_readers(x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    padded = F.pad(with_witness(F.silu(x)), (1, 1), value=1.0)
    return padded * u + padded.sin() * v


def _a_border_in_another_dtype(x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    padded = F.pad(torch.relu(x), (1, 1), value=0.1)
    return padded.bfloat16() * u.bfloat16() + padded * v


@pytest.mark.parametrize("program", [_two_borders_of_one_tensor, _two_readers, _a_border_in_another_dtype])
def test_tensors_that_are_read_twice_have_their_own_borders(program: Callable[..., Tensor]) -> None:
    leaves = leaf(4, 5), leaf(4, 7), leaf(4, 7)
    assert agrees(lambda: program(*leaves), *leaves)


@pytest.mark.parametrize("pad", PADS.values(), ids=PADS)
def test_what_was_changed_behind_autograds_back_is_kept_as_it_is(pad: Callable[[Tensor], Tensor]) -> None:
    x = leaf(*SHAPE)
    weight = torch.randn_like(pad(x)).requires_grad_()

    def run() -> Tensor:
        y = with_witness(F.silu(x * 2))
        with torch.no_grad():
            y[0].mul_(2)
        return pad(y) * weight

    assert agrees(run, x, weight)


def test_a_copy_that_was_changed_between_two_copies_is_kept_as_it_is() -> None:
    x, weight = leaf(4, 5), leaf(4, 7)

    def run() -> Tensor:
        y = with_witness(F.silu(x * 2)).clone()
        with torch.no_grad():
            y.mul_(2)
        return F.pad(y, (1, 1)) * weight

    assert agrees(run, x, weight)


def test_without_a_witness_a_padded_copy_is_kept() -> None:
    x, weight = leaf(4, 5), leaf(4, 7)

    def run() -> Tensor:
        return F.pad(F.silu(x * 2), (1, 1)) * weight

    assert live_bytes(run) == live_bytes(lambda: scoped(run))


def test_a_witness_sees_changes_of_views_and_aliases_and_keeps_no_memory() -> None:
    y = with_witness(F.silu(leaf(4, 5)))
    node = y.grad_fn
    assert is_unchanged(node)
    y.detach().view(20)[3:5].add_(1)
    assert not is_unchanged(node)
    assert live_bytes(lambda: with_witness(F.silu(leaf(4, 5)))) == live_bytes(lambda: F.silu(leaf(4, 5)))


def test_no_witness_without_gradients_or_after_a_change() -> None:
    constant = with_witness(F.silu(torch.randn(3)))
    assert constant.grad_fn is None
    changed = nn.functional.relu(leaf(3) * 1, inplace=True)
    assert not is_unchanged(with_witness(changed).grad_fn)
