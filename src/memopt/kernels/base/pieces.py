"""Work done piece by piece: on fake tensors a trace follows three alike pieces, and counts the others as those."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Protocol

from torch import Tensor

from memopt.torch_compat import FakeTensor

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
