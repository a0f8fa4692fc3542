"""Insert the storages and operations of pieces of work that a trace left out, as copies of alike pieces."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from memopt.kernels.base.pieces import Mark
from memopt.trace.operations import Operation
from memopt.trace.storages import Lifetime

#: (number of pieces since a storage was allocated: 0 or 1, number of the storage among those of its piece).
_Address = tuple[int, int]


def repeat(events: list[Lifetime], operations: list[Operation], first: Mark, second: Mark, count: int) -> bool:
    """Insert `count` copies of the last piece, which began at `second`, before it and after the piece from `first`.
    Returns False and inserts nothing if the two pieces are not alike or a storage of the first piece is still alive."""
    one, two = _Piece(events[: second[0]], first[0]), _Piece(events, second[0])
    costs = [each.at(each.moment - second[0]) for each in operations[second[1] :]]
    before = [each.at(each.moment - first[0]) for each in operations[first[1] : second[1]]]
    addresses = [_address(life, two, one) for life, _ in two.events]
    if costs != before or None in addresses or one.tokens() != two.tokens() or any(x.died < 0 for x in one.made):
        return False
    terms = [_address(life.before, two, one) for life in two.made]
    pieces = [one.made, *([replace(life) for life in one.made] for _ in range(count)), two.made]
    del events[second[0] :], operations[second[1] :]
    for those in zip(pieces[1:], pieces, strict=False):
        start = len(events)
        operations += (each.at(each.moment + start) for each in costs)
        for life, like, term in zip(those[0], two.made, terms, strict=True):
            life.before = like.before if term is None else those[term[0]][term[1]]
        for address, (_, allocated) in zip(addresses, two.events, strict=True):
            assert address is not None
            life = those[address[0]][address[1]]
            if allocated:
                life.born = len(events)
            else:
                life.died = len(events)
            events.append(life)
    return True


class _Piece:
    """The allocations and frees since the event number `start`."""

    def __init__(self, events: Sequence[Lifetime], start: int) -> None:
        self.events = [(life, life.born == moment) for moment, life in enumerate(events[start:], start)]
        self.made = [life for life, allocated in self.events if allocated]
        self.numbers = {life: number for number, life in enumerate(self.made)}

    def tokens(self) -> list[Hashable]:
        """A list that is equal for alike pieces."""
        return [
            (allocated, self.numbers.get(life), life.nbytes, life.birth, life.node < 0, life.recomputed, life.module)
            for life, allocated in self.events
        ]


def _address(life: Lifetime | None, *pieces: _Piece) -> _Address | None:
    found = ((ago, piece.numbers[life]) for ago, piece in enumerate(pieces) if life in piece.numbers)
    return next(found, None)
