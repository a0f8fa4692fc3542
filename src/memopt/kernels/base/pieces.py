"""Work done piece by piece, where plain PyTorch computes what one kernel would: its intermediates then stay small.

On fake tensors a trace follows three alike pieces, and counts the others as those.
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
"""How much a counter has seen: storages allocated or freed, and operations."""


class PieceCounter(Protocol):
    """What follows the storages and operations of a step."""

    def mark(self) -> Mark:
        """Where it is."""

    def repeat(self, first: Mark, second: Mark, count: int) -> bool:
        """Count what happened since `second` `count` times more; False, and nothing, if it is not alike that between
        `first` and `second`."""


_counter: PieceCounter | None = None


@contextlib.contextmanager
def counting(counter: PieceCounter) -> Iterator[None]:
    """Inside, alike pieces of work on fake tensors are counted by `counter`."""
    global _counter
    before, _counter = _counter, counter
    try:
        yield
    finally:
        _counter = before


def pieces(every: Iterable[slice], tensor: Tensor) -> Iterator[slice]:
    """`every` piece of the work on `tensor`, of one size but for the last; in a trace those that are not counted."""
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
    """Rows (of the last dimension) in a part of these tensors; None if they are small, not contiguous or not alike
    in their elements: then all at once."""
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
    return result.data  # an alias that nothing was written to: what was changed in place is not recomputed
