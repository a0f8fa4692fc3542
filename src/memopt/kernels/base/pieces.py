"""Work piece by piece, for plain PyTorch code in the place of one kernel: its intermediates then stay small.

On fake tensors a trace runs the first three pieces and the last one, and counts the others as repeats of the third.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from memopt.kernels.base.device import skips_pieces
from memopt.torch_compat import FakeTensor, is_legacy_batched

Mark = tuple[int, int]
"""Counts of a counter so far: storages allocated or freed, and operations."""


class PieceCounter(Protocol):
    """Counts the storages and operations of a step."""

    def mark(self) -> Mark:
        """The counts so far."""

    def repeat(self, first: Mark, second: Mark, count: int) -> bool:
        """Count all events since `second` `count` times more. If they are not like the events between `first` and
        `second`, count nothing and return False."""


_counter: PieceCounter | None = None


@contextlib.contextmanager
def counting(counter: PieceCounter) -> Iterator[None]:
    """Inside, `counter` counts repeated pieces of work on fake tensors, which do not run."""
    global _counter
    before, _counter = _counter, counter
    try:
        yield
    finally:
        _counter = before


def pieces(every: Iterable[slice], tensor: Tensor) -> Iterator[slice]:
    """The pieces `every` of the work on `tensor`, all but the last of one size; in a trace only those that must run."""
    whole = list(every)
    counter = _counter
    if counter is None or len(whole) < 5 or not isinstance(tensor, FakeTensor):
        yield from whole
        return
    yield whole[0]
    first = counter.mark()
    yield whole[1]
    second = counter.mark()
    yield whole[2]
    yield from whole[-1:] if counter.repeat(first, second, len(whole[3:-1])) else whole[3:]


#: A tensor of at least COUNT * LEAST elements is computed in about COUNT parts.
COUNT, LEAST = 8, 2**15


def parts_of(*tensors: Tensor | None) -> int | None:
    """Rows (of the last dimension) in a part of these tensors; None, for all at once, if they are small, not contiguous
    or of different shapes."""
    given = [tensor for tensor in tensors if tensor is not None]
    first = given[0]
    if first.numel() < COUNT * LEAST or first.dim() < 2:
        return None
    if any(each.shape != first.shape or is_legacy_batched(each) for each in given):
        return None
    if any(not each.is_contiguous() or each.is_meta for each in given):
        return None
    return -(-first.numel() // first.size(-1) // COUNT)


def slices(tensor: Tensor, rows: int) -> Iterator[slice]:
    """The parts of a matrix, `rows` in each."""
    return pieces((slice(start, start + rows) for start in range(0, len(tensor), rows)), tensor)


def elementwise(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """``function(*tensors)``, elementwise, in parts where they are large; without a graph."""
    rows = parts_of(*tensors)
    if rows is None:
        return function(*tensors)
    flat = [tensor.view(-1, tensor.size(-1)) for tensor in tensors]
    result: Tensor | None = None
    for part in slices(flat[0], rows):
        value = function(*(each[part] for each in flat))
        if result is None:
            result = torch.empty(tensors[0].shape, dtype=value.dtype, device=value.device)
        if skips_pieces(result):
            break  # it has no values
        result.view(-1, result.size(-1))[part] = value
    assert result is not None
    return result.data  # an alias with version 0: a tensor changed in place would not be recomputed
