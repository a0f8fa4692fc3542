"""Whether tensors are the same, and the gradients that such a comparison is mostly about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


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


def gradients_of_squares(y: Tensor, inputs: Sequence[Tensor], **options: bool) -> tuple[Tensor, ...]:
    """Gradients of the sum of the squares of `y`, which differ where y differs; `options` are autograd.grad's."""
    return torch.autograd.grad(y.square().sum(), inputs, **options)
