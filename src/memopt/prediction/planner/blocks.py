"""A predicted step, cut into its blocks: what each saves, needs while it runs, and computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from memopt.prediction.events import Event, Storage
from memopt.prediction.peak import Prediction
from memopt.reporting.operations import Operation


@dataclass(frozen=True)
class Block:
    """One block of a step, or what follows the last: the head and the loss. Bytes are those of live storages."""

    saved: int
    """Freed in its backward, of what lives when the last block's backward begins."""
    forward: int
    """The most that lives during its forward, without what the blocks before it saved. The head's is in `backward`."""
    backward: int
    """The same for its backward, without the gradients of parameters that the blocks behind it left."""
    gradients: int
    """Of parameters, that its backward leaves."""
    operations: tuple[tuple[Operation, ...], ...]
    """Of its forward, and of its backward."""


@dataclass(frozen=True)
class Cut:
    """A step, cut into blocks."""

    blocks: tuple[Block, ...]
    """In the order of their forward; the last is the head."""
    base: int
    """Bytes that live all the time from the first forward to the last backward, weights and optimizer states too."""
    floor: int
    """The most bytes that live in the rest of the step: before the first block, and behind its backward."""
    rest: tuple[Operation, ...]
    """Operations there."""


def cut(found: Prediction) -> Cut:
    """The step of `found`, cut where its blocks begin, in forward and in backward."""
    names, count = found.trace.blocks, len(found.trace.blocks)
    forward, backward = _starts(found.events, names)
    resident = sum(storage.nbytes for storage in found.resident)
    live = [*accumulate((event.change for event in found.events), initial=resident)][1:]
    left = [*accumulate((event.change * _is_gradient(event.storage) for event in found.events), initial=0)][1:]
    lives = [each for each in _lives(found.events) if each[1] < backward[-2] <= each[2] and not _is_gradient(each[0])]
    saved = [
        sum(storage.nbytes for storage, _, died in lives if backward[place] <= died < backward[place - 1])
        for place in range(count)
    ]
    base = resident + sum(storage.nbytes for storage, _, died in lives if died >= backward[-1])
    parts = _operations(found, names)
    blocks, before = [], base
    for place in range(count + 1):
        there = live[forward[place] : forward[place + 1]] if place < count else []
        back = range(backward[place], backward[place - 1])
        had = left[back.start - 1]
        blocks.append(
            Block(
                saved=saved[place] if place < count else 0,
                forward=max(there, default=before) - before,
                backward=max((live[at] for at in back), default=before + had) - before - had,
                gradients=left[back.stop - 1] - had,
                operations=parts[place],
            )
        )
        before += saved[place] if place < count else 0
    outside = [*live[: forward[0]], *live[backward[-1] :]]
    return Cut(tuple(blocks), base, max(outside, default=resident), *parts[-1])


def block_of(names: Sequence[str]) -> Callable[[str], int]:
    """Module -> the place among `names` of the block that it is or lies in, adapters' prefixes aside; -1 outside."""

    @cache
    def place(module: str) -> int:
        return next((at for at, name in enumerate(names) if f".{name}." in f".{module}."), -1)

    return place


def _starts(events: Sequence[Event], names: Sequence[str]) -> tuple[list[int], list[int]]:
    """The numbers of the first events of each block, in forward and in backward.

    Behind those of forward stands the head's; behind those of backward the head's, which is the same, and as place -1
    that behind the last backward.
    """
    place_of, count = block_of(names), len(names)
    births = [(at, event.moment, place_of(event.storage.module)) for at, event in enumerate(events) if event.allocated]
    first: dict[tuple[bool, int], int] = {}
    last: dict[tuple[bool, int], int] = {}
    for at, moment, place in births:
        if place >= 0 and moment in ("forward", "backward"):
            first.setdefault((moment == "forward", place), at)
            last[moment == "forward", place] = at
    head = last.get((True, count - 1), -1) + 1
    forward = [head] * (count + 1)
    for place in reversed(range(count)):  # one that allocates nothing has no time of its own
        forward[place] = min(first.get((True, place), head), forward[place + 1])
    backward = [0] * count + [head]
    for place in reversed(range(count)):
        backward[place] = max(first.get((False, place), 0), backward[place + 1])
    return forward, [*backward, max(last.get((False, 0), -1) + 1, backward[0])]


def _lives(events: Sequence[Event]) -> Iterator[tuple[Storage, int, int]]:
    """Storages with the numbers of the events that allocate and free them."""
    born: dict[Storage, int] = {}
    for at, event in enumerate(events):
        if event.allocated:
            born[event.storage] = at
        else:
            yield event.storage, born.pop(event.storage), at


def _is_gradient(storage: Storage) -> bool:
    return storage.part == "gradients"


def _operations(found: Prediction, names: Sequence[str]) -> list[tuple[tuple[Operation, ...], ...]]:
    """Of each block and the head, in forward and backward; and at last the others."""
    forward, backward = _starts(found.trace.events, names)

    def within(low: int, high: int) -> tuple[Operation, ...]:
        return tuple(each for each in found.trace.operations if low <= each.moment < high)

    count = len(names)
    blocks = [(within(forward[at], forward[at + 1]), within(backward[at], backward[at - 1])) for at in range(count)]
    rest = within(0, forward[0]) + within(backward[-1], len(found.trace.events) + 1)
    return [*blocks, (within(backward[count], backward[count - 1]),), (rest,)]
