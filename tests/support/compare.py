"""Whether tensors are the same, the models that are compared, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import memopt
from memopt.plan.recipe import DEFAULT_MEMORY_RECIPE


def same_bits(a: Tensor, b: Tensor, *, strides: bool = False) -> bool:
    """Whether `a` and `b` are the same bit for bit, -0 told from 0; a NaN is as good as another.

    Raises:
        AssertionError: shapes or dtypes differ, or, with `strides`, layouts.
    """
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert not strides or a.stride() == b.stride()
    bits = [torch.where(t.isnan(), torch.nan, t).contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*bits)


def all_equal(a: Iterable[Tensor], b: Iterable[Tensor]) -> bool:
    """Whether as many tensors on both sides have equal values (a NaN equals nothing) and dtypes, in order."""
    return all(one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(a, b, strict=True))


def stock_and_patched(make: Callable[[], Any], recipe: Any = DEFAULT_MEMORY_RECIPE) -> Iterator[Any]:
    """One model as it is, and then another one, patched."""
    yield make()
    yield memopt.patch(make(), recipe)


def gradients_of_squares(y: Tensor, inputs: Sequence[Tensor], **options: bool) -> tuple[Tensor, ...]:
    """Gradients of the sum of the squares of `y`, which differ where y differs; `options` are autograd.grad's."""
    return torch.autograd.grad(y.square().sum(), inputs, **options)


def gradients_of(model: nn.Module, loss: Tensor | None = None) -> dict[str, Tensor]:
    """Copies of the gradients that parameters of `model` have, by name; with a `loss`, of that loss alone."""
    if loss is not None:
        model.zero_grad()
        loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def loss_and_gradients(
    model: nn.Module, inputs: Mapping[str, Any], *, seed: int | None = None, **backward: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """The model's loss, and the gradients of this step alone; random numbers begin at `seed`, if it is given."""
    model.zero_grad()
    if seed is not None:
        torch.manual_seed(seed)
    loss = model(**inputs).loss
    loss.backward(**backward)
    return loss, gradients_of(model)


def step_gradients(model: nn.Module, inputs: Mapping[str, Any], seed: int | None = None) -> dict[str, Tensor]:
    """The gradients of `loss_and_gradients`."""
    return loss_and_gradients(model, inputs, seed=seed)[1]
