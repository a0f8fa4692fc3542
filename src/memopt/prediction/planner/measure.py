"""The cost of every level of every block, from a few traces of a step, each cut into its blocks.

In one trace every block has the recipe's own level. In the others, a run of blocks of one kind has one level and the
next run another, the smallest level first, as in plans. The block in the middle of a run shows what its level saves
against the recipe's own; this holds for every block of that kind. Blocks are of one kind if they have equal FLOPs in
forward and can have the same levels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from memopt.prediction.cards import Card
from memopt.prediction.peak import Prediction
from memopt.prediction.planner.levels import Levels
from memopt.prediction.planner.search import BlockModel, Option
from memopt.trace.events import Event, Storage
from memopt.trace.operations import Operation
from memopt.walk.models.alike import places as block_of


@dataclass(frozen=True)
class Block:
    """One block of a step, or the head and the loss behind the last. Bytes are those of live storages."""

    saved: int
    """Bytes that live when the blocks' forward ends and are freed in this block's backward; 0 for the head."""
    forward: int
    """The most live bytes in its forward, without `Cut.base` and what earlier blocks saved; 0 for the head."""
    backward: int
    """The most in its backward (head: also forward), without `Cut.base`, earlier `saved` and later `gradients`."""
    gradients: int
    """Bytes of the gradients of parameters that its backward adds."""
    operations: tuple[tuple[Operation, ...], ...]
    """Operations of its forward, and of its backward; for the head, all in one tuple."""


@dataclass(frozen=True)
class Cut:
    """A step, cut into blocks."""

    blocks: tuple[Block, ...]
    """In the order of their forward; the last is the head."""
    base: int
    """Bytes that live all the time from the first forward to the last backward, weights and optimizer states too."""
    floor: int
    """The most live bytes in the rest of the step: before the first block's forward, and after its backward."""
    rest: tuple[Operation, ...]
    """Operations in the rest of the step."""


def cut(found: Prediction) -> Cut:
    """The step of `found`, cut where the blocks begin in forward and in backward."""
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


def _starts(events: Sequence[Event], names: Sequence[str]) -> tuple[list[int], list[int]]:
    """The index of the first event of each block, in forward and in backward.

    In both lists the head's first event, which is the same, follows the blocks. The list for backward then has the
    index after the backward of block 0, which runs last: at place -1, it ends block 0 as place i - 1 ends block i.
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
    for place in reversed(range(count)):  # a block without allocations has an empty range
        forward[place] = min(first.get((True, place), head), forward[place + 1])
    backward = [0] * count + [head]
    for place in reversed(range(count)):
        backward[place] = max(first.get((False, place), 0), backward[place + 1])
    return forward, [*backward, max(last.get((False, 0), -1) + 1, backward[0])]


def _lives(events: Sequence[Event]) -> Iterator[tuple[Storage, int, int]]:
    """Storages with the indices of the events that allocate and free them."""
    born: dict[Storage, int] = {}
    for at, event in enumerate(events):
        if event.allocated:
            born[event.storage] = at
        else:
            yield event.storage, born.pop(event.storage), at


def _is_gradient(storage: Storage) -> bool:
    return storage.part == "gradients"


def _operations(found: Prediction, names: Sequence[str]) -> list[tuple[tuple[Operation, ...], ...]]:
    """Operations of each block and the head, in forward and backward; the last entry has the other operations."""
    forward, backward = _starts(found.trace.events, names)
    operations = sorted(found.trace.operations, key=lambda each: each.moment)
    moments = [each.moment for each in operations]

    def within(low: int, high: int) -> tuple[Operation, ...]:
        return tuple(operations[bisect_left(moments, low) : bisect_left(moments, high)])

    count = len(names)
    blocks = [(within(forward[at], forward[at + 1]), within(backward[at], backward[at - 1])) for at in range(count)]
    rest = within(0, forward[0]) + within(backward[-1], len(found.trace.events) + 1)
    return [*blocks, (within(backward[count], backward[count - 1]),), (rest,)]


#: The least blocks in a run: in a shorter run, the levels of its neighbours would show in the middle block.
_RUN = 3
Trace = Callable[[Sequence[int]], Cut]
"""The level of each block, and of the head -> the step at these levels, cut into blocks."""


@dataclass(frozen=True)
class Measured:
    """The cost of every level of every block."""

    own: Cut
    """The step with every block at level 0."""
    examples: tuple[Mapping[int, tuple[Block, Block]], ...]
    """For each block, and the head: level beyond 0 -> a block of its kind at level 0, and that block at this level."""

    def model(self, card: Card) -> BlockModel:
        """The block model of the step for the search, with the rates of `card`."""
        behind = sum(block.gradients for block in self.own.blocks)
        blocks = []
        for own, examples in zip(self.own.blocks, self.examples, strict=True):
            behind -= own.gradients
            options = []
            for of_kind, there in ((own, own), *examples.values()):
                forward = own.forward + there.forward - of_kind.forward
                backward = own.backward + there.backward - of_kind.backward + behind
                saved = max(own.saved + there.saved - of_kind.saved, 0)
                time = max(_time(own, card) + _time(there, card) - _time(of_kind, card), 0)
                options.append(Option(saved, self.own.base + max(forward, backward), time))
            blocks.append(tuple(options))
        return BlockModel(tuple(blocks), self.own.floor, card.nanoseconds(self.own.rest))

    @property
    def at_once(self) -> int:
        """The most bytes that a block needs for itself while it runs, at the block's level that needs least."""
        blocks = (its.values() for its in self.examples[:-1] if its)
        return max((min(max(there.forward, there.backward) for _, there in its) for its in blocks), default=0)

    def levels(self, places: Sequence[int]) -> tuple[int, ...]:
        """The levels of the blocks for a combination of options in :meth:`model`."""
        return tuple((0, *its)[place] for place, its in zip(places, self.examples, strict=True))


def measure(
    levels: Levels, trace: Trace, ahead: Callable[[Sequence[Sequence[int]]], None] = lambda together: None
) -> Measured:
    """Measure the levels: with two traces if each kind has many blocks, else with at most one for each level. `ahead`
    is called with the levels of all traces that follow the first, which are independent."""
    options = levels.options
    own = trace((0,) * len(options))
    kinds: dict[tuple[int, tuple[int, ...], bool], list[int]] = {}
    for place, (block, able) in enumerate(zip(own.blocks, options, strict=True)):
        is_head = place == len(options) - 1
        kinds.setdefault((sum(each.flops for each in block.operations[0]), able, is_head), []).append(place)
    traces: list[list[tuple[int, Sequence[int], Sequence[int]]]] = []
    for (_, able, _), places in kinds.items():
        for number, runs in enumerate(_runs(able[:0:-1], places)):
            traces.extend([] for _ in range(number + 1 - len(traces)))
            traces[number] += [(level, run, places) for level, run in runs]
    examples: list[dict[int, tuple[Block, Block]]] = [{} for _ in options]
    together = [_levels_of(each, len(options)) for each in traces]
    ahead(together)
    for each, chosen in zip(traces, together, strict=True):
        found = trace(chosen)
        for level, run, alike in each:
            for place in alike:
                example = place if len(run) == len(alike) else run[len(run) // 2]
                examples[place][level] = own.blocks[example], found.blocks[example]
    return Measured(own, tuple({level: its[level] for level in sorted(its)} for its in examples))


def _levels_of(runs: list[tuple[int, Sequence[int], Sequence[int]]], count: int) -> list[int]:
    chosen = [0] * count
    for level, run, _ in runs:
        for place in run:
            chosen[place] = level
    return chosen


def _runs(levels: Sequence[int], places: Sequence[int]) -> Iterator[list[tuple[int, Sequence[int]]]]:
    """For each trace, the runs of `places` and the level of each: as few traces as runs of `_RUN` allow."""
    size = max(1, len(places) // _RUN)
    for together in (levels[start : start + size] for start in range(0, len(levels), size)):
        bounds = [len(places) * number // len(together) for number in range(len(together) + 1)]
        yield [(level, places[low:high]) for level, (low, high) in zip(together, pairwise(bounds), strict=True)]


def _time(block: Block, card: Card) -> int:
    return sum(map(card.nanoseconds, block.operations))
